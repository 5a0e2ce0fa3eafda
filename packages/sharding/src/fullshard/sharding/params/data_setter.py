"""``param.data = new`` for sharded parameters and gradients: the new shard is taken over.

Owns the setter. torch's own gives a ``DTensor`` the metadata of the new one and leaves it its
shard, so that new values are lost without a word. Code that was written for plain parameters does
this: averages of weights that are put in their place for an evaluation and taken out again. A
subclass of ``DTensor`` could not help: see [Note: touch]. Costs nothing where nobody sets ``data``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from fullshard.sharding.base.compat import local_shard, set_local_shard, set_spec, spec_of
from fullshard.sharding.params.owner import owner_of

__all__ = ["take_over_data"]

_DATA = cast(Any, torch.Tensor.data)  # the descriptor


def take_over_data() -> None:
    """Makes ``tensor.data = new`` take over the shard of ``new``, for each ``DTensor``.

    In this process, from now on. What is read from ``data`` is torch's.
    """
    if "data" not in vars(DTensor):
        cast(Any, DTensor).data = property(_DATA.__get__, _set_data)


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Makes ``new`` what ``tensor`` holds.

    Raises:
        ValueError: if ``tensor`` is a sharded parameter and ``new`` is not like it.
    """
    owner = owner_of(tensor)
    if owner is not None and owner.param.sharded is tensor:
        owner.param.replace_shard(new)
        owner.group.generation.advance()
        return
    _DATA.__set__(tensor, new)
    if isinstance(new, DTensor):
        set_local_shard(tensor, local_shard(new))
        set_spec(tensor, spec_of(new))
