"""Parts of many tensors as the bytes of one buffer.

Owns where each part lies: every rank's part of a tensor has the same slot, large enough for the
largest, so that one collective of equal sizes moves the parts of many tensors of any dtype. How a
tensor is cut is ``torch.chunk``'s rule, which is ``Shard``'s. It starts no collective.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Cut", "batches", "join", "pack", "unpack"]

_ALIGNMENT = 16  # bytes, so that any dtype may be viewed at the start of a slot
_LARGEST = 64 * 2**20  # bytes of whole tensors that are on the way at once


@dataclass(frozen=True)
class Cut:
    """How one tensor is cut.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        dim: along which it is cut.
        parts: into how many; 1: every rank has all of it.
    """

    shape: torch.Size
    dtype: torch.dtype
    dim: int
    parts: int

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def shape_of(self, index: int) -> torch.Size:
        """Returns the shape of part ``index``."""
        if self.parts == 1:
            return self.shape
        rows = self.shape[self.dim]
        step = -(-rows // self.parts)
        start = min(index * step, rows)
        return torch.Size(
            (*self.shape[: self.dim], min(step, rows - start), *self.shape[self.dim + 1 :])
        )

    def part_of(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """Returns part ``index`` of ``full``: a view."""
        if self.parts == 1:
            return full
        step = -(-self.shape[self.dim] // self.parts)
        start = min(index * step, self.shape[self.dim])
        return full.narrow(self.dim, start, self.shape_of(index)[self.dim])

    @property
    def slot(self) -> int:
        """The bytes that any part of it takes."""
        nbytes = self.shape_of(0).numel() * self.dtype.itemsize
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def batches(cuts: Iterable[Cut]) -> Iterator[tuple[int, int]]:
    """Yields ranges of positions of ``cuts`` that travel together; one of them at least."""
    start = size = end = 0
    for end, cut in enumerate(cuts):
        if end > start and size + cut.nbytes > _LARGEST:
            yield start, end
            start, size = end, 0
        size += cut.nbytes
        end += 1
    if end > start:
        yield start, end


def pack(parts: Sequence[torch.Tensor], cuts: Sequence[Cut], device: torch.device) -> torch.Tensor:
    """Returns ``parts``, one of each cut, as bytes on ``device``."""
    packed = torch.empty(sum(cut.slot for cut in cuts), dtype=torch.uint8, device=device)
    for part, target in zip(parts, _slots(packed, cuts), strict=True):
        found = part.detach().contiguous().reshape(-1)
        target[: found.nbytes].view(found.dtype).copy_(found)
    return packed


def unpack(packed: torch.Tensor, cuts: Sequence[Cut], indices: Sequence[int]) -> list[torch.Tensor]:
    """Returns of each cut the part that ``indices`` says: views of ``packed``."""
    found = []
    for cut, index, slot in zip(cuts, indices, _slots(packed, cuts), strict=True):
        shape = cut.shape_of(index)
        found.append(slot[: shape.numel() * cut.dtype.itemsize].view(cut.dtype).view(shape))
    return found


def join(cut: Cut, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the whole tensor of ``parts``, a new one."""
    return torch.cat(list(parts), cut.dim) if cut.parts > 1 else parts[0].clone()


def _slots(packed: torch.Tensor, cuts: Sequence[Cut]) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(cut.slot for cut in cuts))
    return [packed[end - cut.slot : end] for cut, end in zip(cuts, ends, strict=True)]
