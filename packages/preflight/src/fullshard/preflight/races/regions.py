"""The bytes of a storage that a tensor covers, and whether two tensors share any.

Owns strided views: two columns of a matrix interleave and share nothing. The answer is exact for
all but views of very many separate runs of bytes that no common stride explains; those are taken to
share a byte where their first and last bytes allow it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Region", "region_of"]

_MOST_RUNS = 1 << 16


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of one storage.

    Attributes:
        begin: the first byte.
        end: behind the last one.
        run: contiguous bytes.
        steps: by dimension the count and the stride in bytes of such runs, largest stride first.
    """

    begin: int
    end: int
    run: int
    steps: tuple[tuple[int, int], ...] = ()

    def overlaps(self, other: Region) -> bool:
        """Whether both have a byte in common; True if that is not found out."""
        if self.end <= other.begin or other.end <= self.begin:
            return False
        if not self.steps and not other.steps:
            return True
        if any(self._apart(other, stride) for _, stride in (*self.steps, *other.steps)):
            return False
        if self.count * other.count == 0 or max(self.count, other.count) > _MOST_RUNS:
            return True
        return self._meets(other)

    @property
    def count(self) -> int:
        """How many runs there are."""
        count = 1
        for number, _ in self.steps:
            count *= number
        return count

    def _apart(self, other: Region, stride: int) -> bool:
        """Return whether both regions, modulo a stride, are in intervals that do not meet."""
        mine, others = self._modulo(stride), other._modulo(stride)
        if mine is None or others is None:
            return False
        (start, length), (begin, size) = mine, others
        return (begin - start) % stride >= length and (start - begin) % stride >= size

    def _modulo(self, stride: int) -> tuple[int, int] | None:
        """Return the start modulo a stride and the length; None if it fills all."""
        length = self.run
        for number, step in self.steps:
            if step % stride:
                length += (number - 1) * step
        return (self.begin % stride, length) if length < stride else None

    def _starts(self) -> npt.NDArray[np.int64]:
        starts = np.array([self.begin], dtype=np.int64)
        for number, step in self.steps:
            starts = (starts[:, None] + np.arange(number, dtype=np.int64) * step).reshape(-1)
        return np.sort(starts)

    def _meets(self, other: Region) -> bool:
        mine, others = self._starts(), other._starts()
        # the last run of the other that begins before the end of each of mine
        places = np.searchsorted(others, mine + self.run, side="left") - 1
        reached = np.where(places >= 0, others[places] + other.run, np.iinfo(np.int64).min)
        return bool((reached > mine).any())


def region_of(tensor: torch.Tensor) -> Region:
    """The bytes that a tensor, which has elements, covers."""
    item = tensor.element_size()
    begin = int(tensor.storage_offset()) * item
    given = zip(tensor.stride(), tensor.shape, strict=True)
    dims = sorted((int(stride) * item, size) for stride, size in given if size > 1 and stride)
    run, steps = item, list[tuple[int, int]]()
    for stride, size in dims:
        if stride <= run and not steps:  # touches or laps over the last one: one longer run
            run = max(run, (size - 1) * stride + run)
        else:
            steps.append((size, stride))
    end = begin + run + sum((size - 1) * stride for size, stride in steps)
    return Region(begin, end, run, tuple(reversed(steps)))
