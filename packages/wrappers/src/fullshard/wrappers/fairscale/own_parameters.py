"""Which parameters belong to which wrapper, and under which names FairScale knows them.

Owns the names: paths without the wrappers' own parts, wrapper by wrapper, the outermost first.
"""

from __future__ import annotations

from torch import nn

from fullshard.wrappers.fsdp1.state_dicts.parts import PART
from fullshard.wrappers.wrapper import Wrapper

__all__ = ["names_in_order", "own_parameters", "own_parameters_below"]


def own_parameters(wrapper: Wrapper) -> dict[str, nn.Parameter]:
    """Return the parameters outside of inner wrappers, by every name that they have here."""
    inner = {
        id(param)
        for each in wrapper.modules()
        if isinstance(each, Wrapper) and each is not wrapper
        for param in each.parameters()
    }
    return {
        name.replace(PART, ""): param
        for name, param in wrapper.named_parameters(remove_duplicate=False)
        if id(param) not in inner
    }


def own_parameters_below(wrapper: Wrapper) -> dict[str, dict[str, nn.Parameter]]:
    """Return the own parameters of ``wrapper`` and of each below it, by its path."""
    return {
        f"{path}.".replace(PART, "").removesuffix("."): own_parameters(each)
        for path, each in wrapper.named_modules()
        if isinstance(each, Wrapper)
    }


def names_in_order(wrapper: Wrapper) -> list[str]:
    """Return one name of each parameter, in the order in which FairScale numbers them."""
    found: dict[int, str] = {}
    for path, own in own_parameters_below(wrapper).items():
        for name, param in own.items():
            found.setdefault(id(param), f"{path}.{name}" if path else name)
    return list(found.values())
