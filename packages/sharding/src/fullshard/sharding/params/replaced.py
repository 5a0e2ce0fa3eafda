"""Parameters that ``fully_shard`` replaced: they give up their memory and show the new gradient.

An optimizer that was built before ``fully_shard`` holds them until its first step; as they show the
gradients of their sharded successors, ``zero_grad()`` clears those and a gradient scaler finds
them. [Note: replaced parameters] A replaced parameter is given an empty tensor for its data. Its
memory goes when nothing else holds it: views of it, a state dict taken before, a tensor over the
same storage stay as they were. Freeing the storage itself would pull it away from them. Gradients
go, too.
"""

from __future__ import annotations

import torch
from torch import nn

from fullshard.sharding.base.compat import empty_data
from fullshard.sharding.params.owner import owner_of
from fullshard.sharding.params.param import FSDPParam

__all__ = ["release_replaced"]


class _ReplacedParameter(nn.Parameter):
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


def release_replaced(original: nn.Parameter) -> None:
    """Makes ``original`` give up its memory; see [Note: replaced parameters].

    ``owner_of`` must know it already.
    """
    original.grad = None
    empty_data(original)
    if type(original) is nn.Parameter:
        original.__class__ = _ReplacedParameter
    FSDPParam.changes += 1
