"""Imports packages that extend others, where they are installed.

Entry points would need an installation, and fullshard also runs from a checkout.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

__all__ = ["EXTENSIONS", "TRANSPORTS", "import_installed"]

TRANSPORTS = ("fullshard.samehost",)
"""The packages that have a default transport, imported where one is asked for."""

EXTENSIONS = ("fullshard.policies", "fullshard.insight", "fullshard.optim")
"""The packages that extend groups, steps and schedules, imported at the first ``fully_shard``."""


@functools.cache
def import_installed(names: tuple[str, ...]) -> None:
    """Import each of ``names`` that is installed; later calls do nothing."""
    for name in names:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
