"""Replace names of a module for the code outside of it.

``show`` replaces a name for attribute access and imports. Functions of the module itself read the
module's dictionary, which does not change.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

__all__ = ["hide", "show"]

_SHOWN = "_fullshard_shown"


class _Facade(ModuleType):
    """A module with a second set of names, which hide those of the dictionary."""

    def __getattribute__(self, name: str) -> Any:
        shown = ModuleType.__getattribute__(self, "__dict__")[_SHOWN]
        return shown[name] if name in shown else ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        shown = ModuleType.__getattribute__(self, "__dict__")[_SHOWN]
        if name in shown:
            shown[name] = value
        else:
            ModuleType.__setattr__(self, name, value)


def show(module: ModuleType, name: str, value: object) -> None:
    """Make ``module.name`` return ``value``, except in functions of ``module``."""
    vars(module).setdefault(_SHOWN, {})[name] = value
    module.__class__ = _Facade


def hide(module: ModuleType, name: str) -> None:
    """Undo ``show(module, name, ...)``."""
    shown = vars(module).get(_SHOWN, {})
    shown.pop(name, None)
    if not shown and type(module) is _Facade:
        cast(Any, module).__class__ = ModuleType
        del vars(module)[_SHOWN]
