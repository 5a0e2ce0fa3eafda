"""Automatic wrapping: which modules of a model become groups of their own.

Owns the choice by class or by size and the bottom-up walk that calls ``fully_shard``. Other
parameters are not sharded here: parameters left over go to the root's group.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from fullshard.sharding import FSDPModule, fully_shard, require

__all__ = ["ClassWrap", "SizeWrap", "WrapPolicy", "wrap"]


class WrapPolicy(Protocol):
    """Does a module become a group of its own?"""

    def selects(self, name: str, module: nn.Module, numel: int) -> bool:
        """Return whether to shard ``module``, with ``numel`` elements that are in no group yet."""
        ...


@dataclass(frozen=True)
class ClassWrap:
    """Selects the modules of given classes: a transformer's block, say.

    Attributes:
        classes: the classes; a subclass counts.
    """

    classes: tuple[type[nn.Module], ...]

    def __init__(self, classes: type[nn.Module] | Collection[type[nn.Module]]) -> None:
        """Take one class or several.

        Raises:
            TypeError: if one is not a module class.
            ValueError: if there is none.
        """
        if not isinstance(classes, (type, Collection)):
            raise TypeError(f"classes is {classes!r}; pass a subclass of nn.Module, or several")
        several = (classes,) if isinstance(classes, type) else tuple(classes)
        if not several:
            raise ValueError("classes is empty; pass at least one module class")
        for each in several:
            if not (isinstance(each, type) and issubclass(each, nn.Module)):
                raise TypeError(f"classes holds {each!r}; pass subclasses of nn.Module")
        object.__setattr__(self, "classes", several)

    def selects(self, name: str, module: nn.Module, numel: int) -> bool:
        """Return whether ``module`` is an instance of a given class."""
        return isinstance(module, self.classes)


@dataclass(frozen=True, kw_only=True)
class SizeWrap:
    """Selects a module as soon as it has enough elements that are in no group yet.

    Attributes:
        min_numel: that many elements make a group.
    """

    min_numel: int = 10_000_000

    def __post_init__(self) -> None:
        """Check the field.

        Raises:
            TypeError: if ``min_numel`` is not an int.
            ValueError: if it is not positive.
        """
        if isinstance(self.min_numel, bool) or not isinstance(self.min_numel, int):
            raise TypeError(f"min_numel is {self.min_numel!r}; pass a number of elements")
        if self.min_numel <= 0:
            raise ValueError(f"min_numel is {self.min_numel}; pass a positive number of elements")

    def selects(self, name: str, module: nn.Module, numel: int) -> bool:
        """Return whether ``numel`` reaches ``min_numel``, for a module that has a forward."""
        return numel >= self.min_numel and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def wrap(model: nn.Module, policy: WrapPolicy, **arguments: Any) -> nn.Module:
    """Return ``model`` after ``fully_shard`` on it and every module that ``policy`` selects.

    Args:
        model: the root; it is always sharded, last.
        policy: which modules become groups; asked bottom-up, once per module.
        **arguments: passed on to every ``fully_shard`` call.

    Raises:
        TypeError: if ``policy`` lacks a method.
        ValueError: what ``fully_shard`` raises.
    """
    chooser = require(WrapPolicy, policy, "policy")
    seen: set[nn.Module] = {model}
    counted = {id(param) for param in arguments.get("ignored_params") or ()}  # never in a group
    for child_name, child in model.named_children():
        _wrap_below(child_name, child, chooser, arguments, (seen, counted))
    return fully_shard(model, **arguments)


def _wrap_below(
    name: str,
    module: nn.Module,
    policy: WrapPolicy,
    arguments: dict[str, Any],
    visited: tuple[set[nn.Module], set[int]],
) -> int:
    """Wrap under ``module``, perhaps itself; return how many elements are in no group."""
    seen, counted = visited
    if module in seen or isinstance(module, FSDPModule):
        return 0
    seen.add(module)
    numel = 0
    for param in module.parameters(recurse=False):
        if id(param) not in counted:
            counted.add(id(param))
            numel += param.numel()
    for child_name, child in module.named_children():
        numel += _wrap_below(f"{name}.{child_name}", child, policy, arguments, visited)
    if not policy.selects(name, module, numel):
        return numel
    fully_shard(module, **arguments)
    return 0
