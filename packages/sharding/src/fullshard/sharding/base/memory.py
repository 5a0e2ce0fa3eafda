"""Memory positions of tensors: what to compare to see that a tensor got other memory.

A tensor can get other memory and stay the same object: ``tensor.data = new``, ``tensor.set_(new)``
and ``torch.utils.swap_tensors`` do that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.sharding.base.compat import storage_of

__all__ = ["addresses_of"]


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor, which changes when the tensor gets other memory.

    A fake tensor has no address, so the number of its storage takes the place.
    """
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:
        return list(map(storage_of, tensors))
