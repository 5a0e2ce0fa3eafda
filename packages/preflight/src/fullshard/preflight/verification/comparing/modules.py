"""What modules are set to, and the hooks that sharding added to them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fullshard.preflight.compat import module_hooks
from fullshard.preflight.verification.names import clean

__all__ = [
    "AddedHook",
    "ModuleSettings",
    "added_hooks",
    "apply_settings",
    "differing_settings",
    "module_settings",
]

ModuleSettings = dict[tuple[str, str], Any]
"""By module and attribute a number, a string or None."""

_PLAIN = (bool, int, float, str, type(None))
_LIBRARIES = ("fullshard", "torch")


def module_settings(model: nn.Module) -> ModuleSettings:
    """Return the public attributes of all modules that are numbers, strings or None, by name."""
    return {
        (clean(path), key): value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, _PLAIN) and not key.startswith("_") and key != "training"
    }


def differing_settings(ours: ModuleSettings, theirs: ModuleSettings) -> ModuleSettings:
    """Return those of ``ours`` that ``theirs`` have with another value."""
    return {
        place: value for place, value in ours.items() if place in theirs and theirs[place] != value
    }


def apply_settings(settings: Mapping[tuple[str, str], Any], model: nn.Module, path: str) -> None:
    """Set the attributes of modules in ``model``, which is called ``path``."""
    modules = dict(model.named_modules(prefix=path))
    for (name, key), value in settings.items():
        if name in modules:
            setattr(modules[name], key, value)


@dataclass(frozen=True, kw_only=True)
class AddedHook:
    """A hook of a user's code on a module, which the module did not have before sharding.

    Attributes:
        text: where it is, and its name.
        registry: the module's hooks of this kind.
        number: of the hook there.
    """

    text: str
    registry: dict[int, Any]
    number: int


def added_hooks(model: nn.Module, before: Mapping[int, Any]) -> list[AddedHook]:
    """Return the hooks of user code in ``model`` that are not among ``before``, by id."""
    return [
        AddedHook(
            text=f"{clean(path) or 'the model'} has a {kind} hook, {_name_of(hook)}",
            registry=registry,
            number=number,
        )
        for path, module in model.named_modules()
        for kind, registry in module_hooks(module).items()
        for number, hook in registry.items()
        if id(hook) not in before and not _is_of_library(hook)
    ]


def _routine(hook: Any) -> Any:
    """The function behind a hook, or the class of an object that is called."""
    while isinstance(hook, partial):
        hook = hook.func
    return hook if inspect.isroutine(hook) else type(hook)


def _is_of_library(hook: Any) -> bool:
    # inspect.getmodule() would remember every module there is, also a script that is gone later
    name = getattr(_routine(hook), "__module__", None) or ""
    return name.partition(".")[0] in _LIBRARIES


def _name_of(hook: Any) -> str:
    return str(_routine(hook).__qualname__)
