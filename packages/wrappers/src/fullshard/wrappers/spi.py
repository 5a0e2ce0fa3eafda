"""Names of ``fullshard.wrappers`` for the packages above it. Users import the package itself."""

from __future__ import annotations

from fullshard.wrappers.install.__main__ import main as run_program
from fullshard.wrappers.install.bindings import install, uninstall

__all__ = ["install", "run_program", "uninstall"]
