"""The hooks around every optimizer's step: what a step needs before it, and changes.

Owns them, in the order in which they are written here, and for each optimizer the groups whose kept
copies a step makes stale. Before the user's own hooks: sharded parameters replace the original
ones. After these: an extension may replace what is stepped, and a closure finds nothing stale.
After the step, before the user's hooks: extensions take its results over, and the parameter
generations end.

[Note: what a step changes] All ranks must agree on which copies are stale, but not on which
parameters an optimizer holds: a rank may leave out shards without rows. Therefore a step ends the
generations of all groups, except frozen ones, of each root with a parameter in the optimizer; and
of groups whose shards share memory with a parameter of the optimizer. An optimizer of another model
ends none. An optimizer of a ``DTensor`` that no group owns may step copies of any group's
parameters, and copy them back: it ends all. Finding them again must cost next to nothing, as most
processes step often and change nothing about it: flat lists are compared.

[Note: other optimizers] ``fully_shard`` does not know the optimizers. Therefore the first
``fully_shard`` adds one hook to torch's list of hooks for all optimizers. The hook returns at once
for optimizers without sharded parameters, and these get no hook of their own. An optimizer with
hooks or a closure of the user is an exception: both may add sharded parameters during the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fullshard.sharding.base.compat import storage_of, untraced
from fullshard.sharding.extension import STEP_EXTENSIONS
from fullshard.sharding.groups.param_group import FSDPParamGroup, group_of
from fullshard.sharding.optim.compat import hooks_after_step, hooks_before_step
from fullshard.sharding.optim.live_groups import (
    Snapshot,
    add_groups,
    all_groups,
    are_same,
    params_in,
)
from fullshard.sharding.optim.rebinding import rebind_optimizer
from fullshard.sharding.params.lookup import owner_of
from fullshard.sharding.params.lost_data import require_own_data, require_own_gradients
from fullshard.sharding.params.param import FSDPParam

__all__ = ["watch_optimizers"]

_ATTRIBUTE = "_fullshard_step_hooks"
_registered: list[RemovableHandle] = []


def watch_optimizers(groups: Iterable[FSDPParamGroup]) -> None:
    """Watch the steps of optimizers, for ``groups`` and earlier ones."""
    add_groups(groups)
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_before_all))


@untraced
def _before_all(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Register our hooks on ``optimizer``: the last before its step, and the first after it."""
    hooks: _StepHooks | None = vars(optimizer).get(_ATTRIBUTE)
    if hooks is None or not hooks.knows(optimizer):
        rebind_optimizer(optimizer)
        hooks = vars(optimizer).setdefault(_ATTRIBUTE, _StepHooks())
        hooks.look_at(optimizer)
    if hooks.concerns_us or len(args) > 1 or kwargs or hooks_before_step(optimizer):
        hooks.put_on(optimizer)


class _StepHooks:
    """The hooks of one optimizer, its parameters, and the decisions that follow from them.

    The optimizer holds it: a table of the process would keep an optimizer alive to which the groups
    of a model lead.

    Attributes:
        concerns_us: whether a step changes a parameter of a group, as far as can be seen.
    """

    def __init__(self) -> None:
        """Knows nothing yet: see ``look_at``."""
        self.concerns_us = False
        self._snapshot: Snapshot | None = None
        self._params: list[Any] = []
        self._sharded: list[Any] = []
        self._owners: list[FSDPParam] = []
        self._ended: tuple[FSDPParamGroup, ...] = ()
        self._kin: tuple[FSDPParamGroup, ...] = ()
        self._extensions = [make() for make in STEP_EXTENSIONS]
        self._handles: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as None: a copied optimizer is looked at again."""
        return type(None), ()

    def put_on(self, optimizer: Optimizer) -> None:
        """Register the hooks: the last one before the step, and the first after it.

        Registers again after a user registered or cleared hooks.
        """
        before, after = hooks_before_step(optimizer), hooks_after_step(optimizer)
        ids = [handle.id for handle in self._handles]
        if ids and [next(reversed(before), -1), next(iter(after), -1)] == ids:
            return
        for handle in self._handles:
            handle.remove()
        end = optimizer.register_step_post_hook(self._end)
        self._handles = [optimizer.register_step_pre_hook(self._begin), end]
        after.move_to_end(end.id, last=False)

    def look_at(self, optimizer: Optimizer) -> None:
        """Look for the owners of the parameters that ``optimizer`` holds.

        Raises:
            RuntimeError: if ``data`` of a sharded parameter was set; see [Note: data].
        """
        self._snapshot = None
        self._params = params_in(getattr(optimizer, "param_groups", ()))
        # An optimizer that only wraps another has groups as a property, and the other has hooks.
        own = params_in(vars(optimizer).get("param_groups", ()))
        owned = [(param, owner_of(param)) for param in own if isinstance(param, DTensor)]
        self._sharded = [param for param, owner in owned if owner is not None]
        self._owners = [owner for _, owner in owned if owner is not None]
        self._ended = _groups_of(self._params)
        roots = {group.shared for group in self._ended}
        self._kin = tuple(
            [each for each in all_groups() if each.shared in roots and each not in self._ended]
        )
        for group in (*self._ended, *self._kin):
            if group.generation.data_was_set:
                require_own_data(group.params)
        self.concerns_us = bool(self._ended)
        for each in self._extensions:
            each.on_parameters(optimizer)
        seen = (*self._ended, *self._kin)
        if any(not isinstance(param, DTensor) for param in self._params):
            seen = all_groups()  # any may share memory with it
        self._snapshot = Snapshot([group.generation for group in seen])

    def knows(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer's parameters and all sharded parameters are unchanged."""
        params = params_in(getattr(optimizer, "param_groups", ()))
        current = self._snapshot is not None and self._snapshot.is_current
        return current and are_same(params, self._params)

    @torch.no_grad()
    @untraced
    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the step: with what extensions want to be stepped."""
        require_own_gradients(self._sharded, self._owners)
        stepped, *others = args
        for each in self._extensions:
            stepped = each.before_step(optimizer, stepped)
        run = partial(self._computed, optimizer, stepped)
        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": partial(run, kwargs["closure"])}
        elif others and callable(others[0]):
            others[0] = partial(run, others[0])
        return (stepped, *others), kwargs

    @untraced
    def _computed(
        self, optimizer: Optimizer, stepped: Optimizer, closure: Callable[[], Any]
    ) -> Any:
        """Run a closure on the parameters as the step has them, so that kept copies are stale."""
        with torch.no_grad():
            for each in self._extensions:
                each.before_closure(optimizer, stepped)
        self._end_generations(optimizer)
        result = closure()
        with torch.no_grad():
            for each in self._extensions:
                each.after_closure(optimizer, stepped)
        return result

    @torch.no_grad()
    @untraced
    def _end(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let extensions take the results of the step over."""
        for each in self._extensions:
            each.after_step(optimizer, args[0])
        self._end_generations(optimizer)

    def _end_generations(self, optimizer: Optimizer) -> None:
        """Make kept copies stale; see [Note: what a step changes]."""
        if not self.knows(optimizer):  # a hook or a closure changed it
            self.look_at(optimizer)
        for group in self._ended:
            group.generation.advance()
        for group in self._kin:
            if not all(_is_frozen(param) for param in group.params):
                group.generation.advance()


def _is_frozen(param: FSDPParam) -> bool:
    return not param.sharded.requires_grad and param.sharded.grad is None


def _groups_of(params: list[Any]) -> tuple[FSDPParamGroup, ...]:
    """Return the groups whose parameters a step on ``params`` changes, as far as can be seen."""
    owners = [group_of(param) for param in params]
    others = [param for param, owner in zip(params, owners, strict=True) if owner is None]
    if any(isinstance(param, DTensor) for param in others):
        return all_groups()
    found = {group: None for group in owners if group is not None}
    if others:
        memory = {
            storage_of(param.shard): group for group in all_groups() for param in group.params
        }
        found.update({memory[at]: None for at in map(storage_of, others) if at and at in memory})
    return tuple(found)
