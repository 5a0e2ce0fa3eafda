"""Names of ``fullshard.insight`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.insight.desync import DesyncDetector

__all__ = ["DesyncDetector"]
