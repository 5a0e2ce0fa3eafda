"""Finds the ``FSDPParam`` of a tensor that a user holds, also of a replaced parameter.

Owns the attribute of a sharded or replaced parameter that refers to its ``FSDPParam``. Groups are
unknown here: ``group_of`` returns one.

[Note: replaced parameters] Until its first step, an optimizer that was built before ``fully_shard``
holds the replaced parameters. Replaced parameters show the gradients of their sharded successors,
so that ``zero_grad()`` clears these gradients and a gradient scaler finds them. A replaced
parameter is given an empty tensor for its data. The memory of the old data is freed when no other
tensor uses it: views, an earlier state dict, and tensors over the same storage stay valid. Freeing
the storage itself would pull it away from them. Gradients go, too.
"""

from __future__ import annotations

import torch
from torch import nn

from fullshard.sharding.base.compat import empty_data
from fullshard.sharding.params.param import FSDPParam

__all__ = ["owner_of", "release_replaced", "set_owner", "sharded_of"]

_ATTRIBUTE = "_fullshard_owner"


def owner_of(param: torch.Tensor) -> FSDPParam | None:
    """Return who shards ``param``, given the sharded parameter or the one that it replaced."""
    owner: FSDPParam | None = getattr(param, _ATTRIBUTE, None)
    return owner


def sharded_of(param: torch.Tensor) -> torch.Tensor:
    """Return the sharded parameter for ``param``, or ``param`` itself if it is not sharded."""
    owner = owner_of(param)
    return param if owner is None else owner.sharded


def set_owner(param: nn.Parameter, owner: FSDPParam) -> None:
    """Make ``owner_of(param)`` return ``owner``."""
    setattr(param, _ATTRIBUTE, owner)


class _ReplacedParameter(nn.Parameter):
    """A parameter whose gradient is that of its sharded successor."""

    @property
    def grad(self) -> torch.Tensor | None:
        owner = owner_of(self)
        return None if owner is None else owner.sharded.grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        owner = owner_of(self)
        if owner is not None:
            owner.sharded.grad = gradient


def release_replaced(original: nn.Parameter) -> None:
    """Make ``original`` give up its memory; see [Note: replaced parameters].

    ``owner_of`` must know it already.
    """
    original.grad = None
    empty_data(original)
    if type(original) is nn.Parameter:
        original.__class__ = _ReplacedParameter
