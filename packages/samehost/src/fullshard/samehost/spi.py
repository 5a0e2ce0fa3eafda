"""Names of ``fullshard.samehost`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.samehost.automatic import shares_memory

__all__ = ["shares_memory"]
