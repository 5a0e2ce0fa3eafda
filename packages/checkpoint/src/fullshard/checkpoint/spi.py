"""Names of ``fullshard.checkpoint`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.checkpoint.boxes import Box, box_at, box_here
from fullshard.checkpoint.parts import Place, as_cut, fitted, unwrapped, whole

__all__ = [
    "Box",
    "Place",
    "as_cut",
    "box_at",
    "box_here",
    "fitted",
    "unwrapped",
    "whole",
]
