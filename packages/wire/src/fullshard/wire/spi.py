"""Names of ``fullshard.wire`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.wire.draws import drawn_bits
from fullshard.wire.runs import runs_of

__all__ = [
    "drawn_bits",
    "runs_of",
]
