"""Automatic wrapping: which modules of a model become groups of their own.

Owns the choice by class or by size and the bottom-up walk that calls ``fully_shard``. Other
parameters are not sharded here: parameters left over go to the root's group.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import nn

from fullshard.sharding import FSDPModule, fully_shard, require
from fullshard.sharding.spi import declares

__all__ = ["ClassWrap", "SizeWrap", "WrapPolicy", "wrap"]


class WrapPolicy(Protocol):
    """Does a module become a group of its own?

    A policy whose ``must_select`` is true raises an error if it selects no module of a model.
    """

    def selects(self, name: str, module: nn.Module, numel: int) -> bool:
        """Return whether to shard ``module``, with ``numel`` elements that are in no group yet."""
        ...


@dataclass(frozen=True)
class ClassWrap:
    """Selects the modules of given classes: a transformer's block, say.

    Attributes:
        classes: the classes; a subclass counts.
        must_select: True: a model without any of the classes is an error.
    """

    must_select: ClassVar[bool] = True
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
        ValueError: what ``fully_shard`` raises; or if ``model`` has no module of the classes of a
            ``ClassWrap``.
    """
    chooser = require(WrapPolicy, policy, "policy")
    ignored = {id(param) for param in arguments.get("ignored_params") or ()}  # never in a group
    walk = _Walk(chooser, {model}, ignored)
    for child_name, child in model.named_children():
        walk.choose_below(child_name, child)
    if not walk.chosen:
        _require_selection(model, chooser)
    for module in walk.chosen:
        fully_shard(module, **arguments)
    return fully_shard(model, **arguments)


def _require_selection(model: nn.Module, policy: WrapPolicy) -> None:
    """Check that ``policy``, which chose nothing to wrap, may do so.

    Raises:
        ValueError: if it must select something, and there is none in ``model``, itself included.
    """
    modules = dict(model.named_modules())
    if not declares(policy, "must_select") or any(
        policy.selects(name, module, 0) for name, module in modules.items()
    ):
        return
    classes = sorted({type(module).__name__ for module in modules.values()})
    raise ValueError(
        f"{policy} selects no module of {type(model).__name__}, whose modules are of the classes "
        f"{', '.join(classes)}; name a class that repeats, such as a transformer's block, or call "
        "fully_shard(model) for a single group"
    )


@dataclass(frozen=True)
class _Walk:
    """A walk over a model, bottom-up, that asks a policy about each module once.

    Attributes:
        policy: the policy.
        seen: modules that were visited.
        counted: ids of parameters that are in no group to come.
        chosen: what the policy selected, innermost first.
    """

    policy: WrapPolicy
    seen: set[nn.Module]
    counted: set[int]
    chosen: list[nn.Module] = field(default_factory=list)

    def choose_below(self, name: str, module: nn.Module) -> int:
        """Ask under ``module``, and about itself; return how many elements are in no group."""
        if module in self.seen or isinstance(module, FSDPModule):
            return 0
        self.seen.add(module)
        numel = 0
        for param in module.parameters(recurse=False):
            if id(param) not in self.counted:
                self.counted.add(id(param))
                numel += param.numel()
        for child_name, child in module.named_children():
            numel += self.choose_below(f"{name}.{child_name}", child)
        if not self.policy.selects(name, module, numel):
            return numel
        self.chosen.append(module)
        return 0
