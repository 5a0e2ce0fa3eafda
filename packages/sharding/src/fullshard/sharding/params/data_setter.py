"""Replaces ``DTensor.data``, so that ``tensor.data = new`` takes the new values over.

``fully_shard`` does not do this, as it changes every ``DTensor`` of the process. Front doors for
code that was written for plain parameters do, and users. Without it the assignment is an error;
see [Note: data].
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from fullshard.sharding.base.memory import DATA, set_data
from fullshard.sharding.params.lookup import owner_of

__all__ = ["take_over_data"]


def take_over_data() -> None:
    """Make ``tensor.data = new`` use the values of ``new``, for each ``DTensor``.

    The call replaces the attribute ``DTensor.data``, in this process and from now on. Reading
    ``data`` works as in torch. A sharded parameter takes a ``DTensor`` like itself, as
    ``torch.empty_like(param)`` returns, or a full tensor; a gradient takes a ``DTensor``.

    Without the call, torch changes the metadata of a ``DTensor`` and loses the new values, and
    fullshard raises an error when it next uses the parameter or the gradient.
    ``FullyShardedDataParallel``, of PyTorch FSDP1 and of FairScale, makes the call.
    """
    if "data" not in vars(DTensor):
        cast(Any, DTensor).data = property(DATA.__get__, _set_data)


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
    set_data(tensor, new)
    if isinstance(new, DTensor):
        vars(tensor).pop("noted_storage", None)
