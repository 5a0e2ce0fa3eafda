"""The hooks around every optimizer's step: what a step needs before it, and changes.

Owns them, in the order in which they are written here, and for each optimizer the groups whose kept
copies a step makes stale. Before the user's own hooks: sharded parameters take the place of those
that they replaced. After these: a shadow optimizer is stepped where that is needed, and a closure
finds nothing stale. After the step, before the user's hooks: its results are taken over, and the
parameter generations end.

[Note: what a step changes] All ranks must agree on which copies are stale, but not on which
parameters an optimizer holds: a rank may leave out shards without rows. So a step ends the
generations of all groups of each root of which it holds a parameter, but those of groups that are
frozen; and of groups in whose shards' memory a parameter of it lies. An optimizer of another model
ends none. One that holds a ``DTensor`` that no group owns may step copies of any group's
parameters, which it copies back: it ends all. Finding them again must cost next to nothing, as most
processes step often and change nothing about it: flat lists are compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fullshard.sharding.groups.param_group import FSDPParamGroup, group_of
from fullshard.sharding.optim.closures import Closure, StepArguments, wrap_closure
from fullshard.sharding.optim.rebinding import rebind_optimizer
from fullshard.sharding.optim.rules import steps_on_plain
from fullshard.sharding.optim.shadow import UnlikeShards, are_same
from fullshard.sharding.optim.shadow_optimizer import (
    ShadowOptimizer,
    open_on,
    own_params_of,
    place_state,
)
from fullshard.sharding.params.owner import Owner, owner_of
from fullshard.sharding.params.param import FSDPParam

__all__ = ["watch_optimizers"]

_groups: weakref.WeakSet[FSDPParamGroup] = weakref.WeakSet()
_watched: weakref.WeakKeyDictionary[Optimizer, _Watch] = weakref.WeakKeyDictionary()
_registered: list[RemovableHandle] = []


def watch_optimizers(groups: Iterable[FSDPParamGroup]) -> None:
    """Puts the hooks on every optimizer of this process, for ``groups`` and earlier ones."""
    _groups.update(groups)
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_before_all))


def _before_all(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Is called before the user's own hooks."""
    watch = _watched.get(optimizer)
    if watch is None:
        rebind_optimizer(optimizer)
        watch = _watched[optimizer] = _Watch(optimizer)
    watch.before_all(optimizer)


class _Watch:
    """The hooks of one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Registers them."""
        self._held = _Held(optimizer)
        self._kept: ShadowOptimizer | None = None
        self._before = optimizer.register_step_pre_hook(self._begin)
        _move(optimizer.register_step_post_hook(self._end), last=False)
        self._places_state = False

    def before_all(self, optimizer: Optimizer) -> None:
        """Looks at what the optimizer holds; its own hooks come after the user's."""
        if not self._held.is_of(optimizer):
            rebind_optimizer(optimizer)
            self._held = _Held(optimizer)
        _move(self._before, last=True)
        if self._held.steps_elsewhere and not self._places_state:
            self._places_state = True
            optimizer.register_load_state_dict_post_hook(place_state)
            place_state(optimizer)

    @torch.no_grad()
    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments:
        """Returns what ``step`` is called with."""
        args, kwargs = wrap_closure(args, kwargs, partial(self._after_changes, optimizer))
        for outer in open_on(self._held.params):
            outer.write_back()
        return self._with_shadow(optimizer, args, kwargs) or (args, kwargs)

    def _after_changes(self, optimizer: Optimizer, closure: Closure) -> Closure:
        """Returns ``closure``, before which kept copies are stale: the step changed parameters."""

        def run() -> Any:
            self._end_generations(optimizer)
            return closure()

        return run

    def _with_shadow(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        """Returns arguments with a shadow optimizer, if one is to be stepped."""
        if args[0] is not optimizer:  # a user's hook chose what to step
            return None
        if self._held.steps_on_plain and not torch.compiler.is_compiling():
            shadow = self._kept or ShadowOptimizer(plain=True)
            try:
                begun = shadow.begin(optimizer, args, kwargs)
                self._kept = None if shadow.has_copies else shadow
                return begun
            except UnlikeShards:
                pass
        if self._held.steps_elsewhere:
            return ShadowOptimizer(plain=False).begin(optimizer, args, kwargs)
        return None

    @torch.no_grad()
    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Takes the results of the step over."""
        shadow = ShadowOptimizer.of(args[0])
        if shadow is not None:
            shadow.end(optimizer, args[0])
        for outer in open_on(self._held.params):
            outer.read()
        self._end_generations(optimizer)

    def _end_generations(self, optimizer: Optimizer) -> None:
        if not self._held.is_of(optimizer):  # a hook or a closure changed it
            self._held = _Held(optimizer)
        self._held.end_generations()


def _move(handle: RemovableHandle, *, last: bool) -> None:
    """Makes the hook of ``handle`` the first or the last of those registered beside it."""
    hooks = handle.hooks_dict_ref()
    assert hooks is not None, "the optimizer is alive"
    hooks.move_to_end(handle.id, last=last)


class _Held:
    """What one optimizer holds, and what follows of it.

    Attributes:
        params: all parameters of its groups.
        steps_on_plain: it may step on shards as plain tensors.
        steps_elsewhere: some of its parameters may have to be stepped elsewhere.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Looks for the owners of the parameters.

        Raises:
            TypeError: if it needs whole parameters and one is cut.
        """
        self.params = _params_of(optimizer)
        self._changes = FSDPParam.changes
        own = own_params_of(optimizer)
        owners = [owner for param in own if (owner := _sharder_of(param)) is not None]
        self.steps_on_plain = bool(owners) and steps_on_plain(type(optimizer), own)
        self.steps_elsewhere = any(map(_steps_elsewhere, owners))
        self._groups = _groups_of(self.params)
        self._kin = _kin_of(self._groups)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Tells whether it holds the same, and no sharded parameter was replaced since."""
        return self._changes == FSDPParam.changes and are_same(_params_of(optimizer), self.params)

    def end_generations(self) -> None:
        """Makes kept copies stale; see [Note: what a step changes]."""
        for group in self._groups:
            group.generation.advance()
        for group in self._kin:
            if not all(_is_frozen(param) for param in group.params):
                group.generation.advance()


def _params_of(optimizer: Optimizer) -> list[Any]:
    groups = getattr(optimizer, "param_groups", ())
    return list(chain.from_iterable(group["params"] for group in groups))


def _sharder_of(param: torch.Tensor) -> Owner | None:
    return owner_of(param) if isinstance(param, DTensor) else None


def _steps_elsewhere(owner: Owner) -> bool:
    probe = torch.empty(0, device=owner.param.shard.device)
    return owner.param.offload.stage_step(probe, owner.group.device) is not probe


def _is_frozen(param: FSDPParam) -> bool:
    return not param.sharded.requires_grad and param.sharded.grad is None


def _groups_of(params: list[Any]) -> tuple[FSDPParamGroup, ...]:
    """Returns the groups whose parameters a step on ``params`` changes, as far as can be seen."""
    owners = [group_of(param) for param in params]
    others = [param for param, owner in zip(params, owners, strict=True) if owner is None]
    if any(isinstance(param, DTensor) for param in others):
        return tuple(_groups)
    found = {group: None for group in owners if group is not None}
    if others:
        memory = {_memory_of(param.shard): group for group in _groups for param in group.params}
        found.update({memory[at]: None for at in map(_memory_of, others) if at and at in memory})
    return tuple(found)


def _kin_of(groups: Collection[FSDPParamGroup]) -> tuple[FSDPParamGroup, ...]:
    """Returns the other groups of their roots."""
    roots = {id(group.shared) for group in groups}
    return tuple(each for each in _groups if id(each.shared) in roots and each not in groups)


def _memory_of(tensor: torch.Tensor) -> int:
    """Returns where the memory of ``tensor`` begins; 0 where it has none, or none to be seen."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a wrapper subclass, or a fake tensor
        return 0
