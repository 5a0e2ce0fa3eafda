"""The parameters that a module holds by name, whether Python or TorchScript keeps them.

A module that ``torch.jit.trace`` made keeps its parameters in C++. Its ``_parameters`` can be read
and written by name, but is no dict and has no ``get``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol, cast

from torch import nn

__all__ = ["Registry", "registry_of"]


class Registry(Protocol):
    """The parameters of a module, by name."""

    def get(self, name: str, /) -> nn.Parameter | None:
        """Return the parameter ``name``, or None."""
        ...

    def __setitem__(self, name: str, param: nn.Parameter, /) -> None:
        """Make ``param`` the parameter ``name``."""
        ...


class _TracedParameters:
    """The parameters of a traced module."""

    def __init__(self, held: MutableMapping[str, nn.Parameter]) -> None:
        """Wrap ``held``, torch's object for them."""
        self._held = held

    def get(self, name: str, /) -> nn.Parameter | None:
        """Return the parameter ``name``, or None."""
        return self._held[name] if name in self._held else None  # noqa: SIM401  # it has no get

    def __setitem__(self, name: str, param: nn.Parameter, /) -> None:
        """Make ``param`` the parameter ``name``."""
        self._held[name] = param


def registry_of(module: nn.Module) -> Registry:
    """Return the parameters of ``module`` by name, as the module's own dict if it has one."""
    held: Any = module._parameters
    return cast(Registry, held if isinstance(held, dict) else _TracedParameters(held))
