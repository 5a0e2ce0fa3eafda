"""Parameters that ``fully_shard`` replaced, and the optimizers that still hold them.

Owns giving up their memory, and handing their sharded successors to an optimizer that was built
before ``fully_shard``, just before its first step. Until then it sees their gradients, so that
``zero_grad()`` clears them and a gradient scaler finds them. It refuses to guess what state that
was made for a full parameter means for a shard.

[Note: retired] A retired parameter is given an empty tensor for its data. Its memory goes when
nothing else holds it: views of it, a state dict taken before, a tensor over the same storage stay
as they were. Freeing the storage itself would pull it away from them. Gradients go, too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fullshard.sharding.base.compat import empty_data
from fullshard.sharding.params.owner import Owner, owner_of

__all__ = ["rebind_optimizer", "retire", "watch_retired"]

_Seen = tuple[int, tuple[int, ...]]


class _Retired:
    """How many parameters were retired, and what was looked at since.

    Attributes:
        count: parameters retired in this process.
        seen: per optimizer the count at its last check, and the lengths of its groups then.
        hook: the hook on all optimizers, once it is registered.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()
        self.hook: RemovableHandle | None = None


_retired = _Retired()


class _RetiredParameter(nn.Parameter):
    """A parameter whose gradient is that of its sharded successor."""

    @property
    def grad(self) -> torch.Tensor | None:
        owner = owner_of(self)
        return None if owner is None else owner.param.sharded.grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        owner = owner_of(self)
        if owner is not None:
            owner.param.sharded.grad = gradient


def retire(original: nn.Parameter) -> None:
    """Makes ``original``, which ``fully_shard`` replaced, give up its memory; see [Note: retired].

    ``owner_of`` must know it already.
    """
    original.grad = None
    empty_data(original)
    if type(original) is nn.Parameter:
        original.__class__ = _RetiredParameter
    _retired.count += 1


def watch_retired() -> None:
    """Makes every optimizer of this process let go of retired parameters before it steps."""
    if _retired.hook is None:
        _retired.hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    seen = _seen_now(optimizer)
    if _retired.seen.get(optimizer) != seen:
        rebind_optimizer(optimizer)


def _seen_now(optimizer: Optimizer) -> _Seen:
    # an optimizer that only wraps others has its groups as a property; those have hooks themselves
    groups = vars(optimizer).get("param_groups", ())
    return _retired.count, tuple(len(group["params"]) for group in groups)


def rebind_optimizer(optimizer: Optimizer) -> None:
    """Gives ``optimizer`` the sharded parameters in the place of those that they replaced.

    The first step does it by itself; call it where an optimizer that was built before
    ``fully_shard`` must be right earlier, as for a checkpoint. Parameters that were unsharded when
    the optimizer was built are replaced, too. Groups keep their options and the order of their
    parameters.

    Raises:
        RuntimeError: if the optimizer has state for one of them: that of a full parameter does not
            fit its shard. Nothing is changed then.
    """
    replaced: dict[nn.Parameter, Owner] = {}
    for group in vars(optimizer).get("param_groups", ()):
        for param in group["params"]:
            owner = owner_of(param)
            if owner is not None and owner.param.sharded is not param:
                replaced[param] = owner
    for param, owner in replaced.items():
        _require_no_state(optimizer, param, owner)
    for group in vars(optimizer).get("param_groups", ()) if replaced else ():
        # in place: LBFGS keeps the list
        group["params"][:] = [_successor(param, replaced) for param in group["params"]]
    for param in replaced:
        state = optimizer.state.pop(param, None)
        if state:
            optimizer.state[_successor(param, replaced)] = state
    _retired.seen[optimizer] = _seen_now(optimizer)


def _successor(param: nn.Parameter, replaced: dict[nn.Parameter, Owner]) -> nn.Parameter:
    owner = replaced.get(param)
    return param if owner is None else owner.param.sharded


def _require_no_state(optimizer: Optimizer, param: nn.Parameter, owner: Owner) -> None:
    if not optimizer.state.get(param):
        return
    if isinstance(param, DTensor) and param.placements == owner.param.spec.placements:
        return  # a shard that was replaced by one that is cut alike: its state fits
    raise RuntimeError(
        f"{type(optimizer).__name__} has state for {owner.param.name}, which fully_shard has "
        "replaced by its shard since, and that state does not fit; build the optimizer after "
        "fully_shard, then load its state with "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards it"
    )
