"""Names of ``fullshard.policies`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.policies.file_space import ALIGNMENT, Extent, FileSpace, aligned
from fullshard.policies.offload_errors import raise_lost_gradients

__all__ = ["ALIGNMENT", "Extent", "FileSpace", "aligned", "raise_lost_gradients"]
