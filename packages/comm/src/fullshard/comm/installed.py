"""Imports packages that extend others, where they are installed.

Entry points would need an installation, and fullshard also runs from a checkout.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

__all__ = ["EXTENDING", "import_extending"]

EXTENDING = ("fullshard.insight",)
"""The packages: the only place of the core that names one."""


@functools.cache
def import_extending() -> None:
    """Import each of ``EXTENDING`` that is installed; later calls do nothing."""
    for name in EXTENDING:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
