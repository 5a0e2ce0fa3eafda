"""The memory of tensors: what to compare to see that a tensor got other memory, and how to set it.

A tensor can get other memory and stay the same object: ``tensor.data = new``, ``tensor.set_(new)``
and ``torch.utils.swap_tensors`` do that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fullshard.sharding.base.compat import (
    local_shard,
    set_local_shard,
    set_spec,
    spec_of,
    storage_of,
)

__all__ = ["addresses_of", "set_data", "storage_object"]


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor, which changes when the tensor gets other memory.

    A fake tensor has no address, so the number of its storage takes the place.
    """
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:
        return list(map(storage_of, tensors))


def storage_object(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of ``tensor``: one object while it lives. None without a storage."""
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # some wrapper subclasses, and sparse
        return None


def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Do ``tensor.data = new``; of a ``DTensor``, take its local shard and spec over, too."""
    tensor.data = new
    if isinstance(new, DTensor):
        set_local_shard(tensor, local_shard(new))
        set_spec(tensor, spec_of(new))
