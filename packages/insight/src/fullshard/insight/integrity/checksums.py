"""Positional checksums of tensors: exact, for any dtype, on any device.

Owns the arithmetic. [Note: checksum] Elements are read as integers ``w[i]``. The checksum is the
pair ``sum(w[i])`` and ``sum((i + 1) * w[i])``, modulo ``2 ** 64``. The first one changes with any
single element, since the change is less than ``2 ** 64``. The second one changes when two unequal
elements change places. Several changes stay unnoticed only if both sums cancel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["checksum", "checksums", "is_one_bit"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_MODULUS = 1 << 64  # of the sums
_BLOCK = 1 << 16  # elements that are widened at a time


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum of ``tensor``, ``[2]`` int64 on its device; see [Note: checksum]."""
    flat = tensor.detach().reshape(-1)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    words = flat.view(_WORDS[flat.dtype.itemsize])
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + block.numel(), device=words.device)
        total[0] += block.sum()
        total[1] += places.mul_(block).sum()
    return total


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the checksum of each tensor, ``[len(tensors), 2]`` on the CPU."""
    if not tensors:
        return torch.zeros(0, 2, dtype=torch.int64)
    return torch.stack([checksum(each) for each in tensors]).cpu()


def is_one_bit(before: torch.Tensor, now: torch.Tensor, numel: int) -> bool:
    """Return whether two checksums of a tensor differ as if one bit of one element had changed.

    The first sum changes by a power of two, and the second sum by a multiple of that power: the
    element's place, from 1 to ``numel``.
    """
    pairs: list[list[int]] = torch.stack([before, now], 1).tolist()
    change, weighted = [(b - a) % _MODULUS for a, b in pairs]
    if change.bit_count() != 1:
        change, weighted = -change % _MODULUS, -weighted % _MODULUS
    if change.bit_count() != 1:
        return False
    place, rest = divmod(weighted, change)
    return rest == 0 and (place or _MODULUS // change) <= numel
