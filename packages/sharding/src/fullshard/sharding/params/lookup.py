"""Finds the ``FSDPParam`` of a tensor that a user holds, and makes old ways to use it work.

Owns the attribute of a sharded or replaced parameter that refers to its ``FSDPParam``. Groups are
unknown here: ``group_of`` returns one.

[Note: replaced parameters] Until its first step, an optimizer that was built before ``fully_shard``
holds the replaced parameters. Replaced parameters show the gradients of their sharded successors,
so that ``zero_grad()`` clears these gradients and a gradient scaler finds them. A replaced
parameter is given an empty tensor for its data. The memory of the old data is freed when no other
tensor uses it: views, an earlier state dict, and tensors over the same storage stay valid. Freeing
the storage itself would pull it away from them. Gradients go, too.

``param.data = new`` takes the new shard over, of sharded parameters and gradients. torch's own
gives a ``DTensor`` the metadata of the new one and leaves it its shard, so that new values are lost
without a word. Code that was written for plain parameters does this: it swaps in averages of
weights for an evaluation, and restores the weights afterwards. A subclass of ``DTensor`` could not
help: see [Note: touch]. The override costs nothing if ``data`` is not set.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding.base.compat import (
    empty_data,
    local_shard,
    set_local_shard,
    set_spec,
    spec_of,
)
from fullshard.sharding.params.param import FSDPParam

__all__ = ["owner_of", "release_replaced", "set_owner", "sharded_of", "take_over_data"]

_ATTRIBUTE = "_fullshard_owner"
_DATA = cast(Any, torch.Tensor.data)  # the descriptor


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
    FSDPParam.changes += 1


def take_over_data() -> None:
    """Make ``tensor.data = new`` take over the shard of ``new``, for each ``DTensor``.

    In this process, from now on. Reading ``data`` works as in torch.
    """
    if "data" not in vars(DTensor):
        cast(Any, DTensor).data = property(_DATA.__get__, _set_data)


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Make ``new`` what ``tensor`` holds.

    Raises:
        ValueError: if ``tensor`` is a sharded parameter and ``new`` is not like it.
    """
    owner = owner_of(tensor)
    if owner is not None and owner.sharded is tensor:
        owner.replace_shard(new)
        owner.generation.advance()
        return
    _DATA.__set__(tensor, new)
    if isinstance(new, DTensor):
        set_local_shard(tensor, local_shard(new))
        set_spec(tensor, spec_of(new))
