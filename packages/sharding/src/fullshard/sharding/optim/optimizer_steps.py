"""Which parameters an optimizer's step changes, and whose kept copies are stale after it.

Owns the hooks on all optimizers of the process, and for each optimizer the generations that its
steps end: of the groups that own one of its parameters, or whose shards lie in the memory of one.
Finding them again must cost next to nothing, as most processes step often and change nothing about
it: flat lists are compared. An optimizer of another model ends none. One that holds a ``DTensor``
that no group owns may step copies of any group's parameters, which it copies back: it ends all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fullshard.sharding.base.closures import Closure, StepArguments, has_closure, wrap_closure
from fullshard.sharding.base.generation import ParameterGeneration
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.params.owner import owner_of
from fullshard.sharding.params.param import FSDPParam

__all__ = ["watch_optimizers"]


class _Held:
    """What one optimizer holds, and the generations that its steps end."""

    def __init__(self, params: list[Any]) -> None:
        """Looks for the owners of ``params``."""
        self._params = params
        self._changes = FSDPParam.changes
        self.generations = _generations_of(params)

    def is_of(self, params: list[Any]) -> bool:
        """Tells whether it was made of ``params``, and no sharded parameter was replaced since."""
        return (
            self._changes == FSDPParam.changes
            and len(params) == len(self._params)
            and all(map(is_, params, self._params))  # ``==`` of tensors is another question
        )


_groups: weakref.WeakSet[FSDPParamGroup] = weakref.WeakSet()
_held: weakref.WeakKeyDictionary[Optimizer, _Held] = weakref.WeakKeyDictionary()
_registered: list[RemovableHandle] = []


def watch_optimizers(groups: Iterable[FSDPParamGroup]) -> None:
    """Makes steps of any optimizer end the generations of those of ``groups`` that it changes."""
    _groups.update(groups)
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_before_step))
        _registered.append(register_optimizer_step_post_hook(_on_step))


def _on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    groups = getattr(optimizer, "param_groups", ())
    params = list(chain.from_iterable(group["params"] for group in groups))
    held = _held.get(optimizer)
    if held is None or not held.is_of(params):
        held = _held[optimizer] = _Held(params)
    for generation in held.generations:
        generation.stepped()


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepArguments | None:
    """Makes a closure see what the step that calls it has done so far."""
    if not has_closure(args, kwargs):
        return None
    return wrap_closure(args, kwargs, partial(_after_changes, optimizer))


def _after_changes(optimizer: Optimizer, closure: Closure) -> Closure:
    """Returns ``closure``, before which kept copies are stale."""

    def run() -> Any:
        _on_step(optimizer, (), {})
        return closure()

    return run


def _generations_of(params: list[Any]) -> tuple[ParameterGeneration, ...]:
    """Returns the generations that a step on ``params`` ends."""
    owners = [owner_of(param) for param in params]
    others = [param for param, owner in zip(params, owners, strict=True) if owner is None]
    if any(isinstance(param, DTensor) for param in others):
        return tuple(group.generation for group in _groups)
    found = {owner.group.generation: None for owner in owners if owner is not None}
    if others:
        memory = {
            _memory_of(param.shard): group.generation for group in _groups for param in group.params
        }
        found.update({memory[at]: None for at in map(_memory_of, others) if at and at in memory})
    return tuple(found)


def _memory_of(tensor: torch.Tensor) -> int:
    """Returns where the memory of ``tensor`` begins; 0 where it has none, or none to be seen."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a wrapper subclass, or a fake tensor
        return 0
