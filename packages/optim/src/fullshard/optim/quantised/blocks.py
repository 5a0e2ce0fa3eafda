"""Blocks: 256 elements of a row of the whole parameter, quantised by the largest of them.

Owns where blocks lie in a shard. They are counted from the start of the *whole* row, so that no cut
changes them; a shard whose rows are cut holds parts of blocks at its ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fullshard.checkpoint.boxes import Box
from fullshard.optim.quantised.dynamic_map import decoded, encoded

__all__ = ["SIZE", "Blocks", "count_in"]

SIZE = 256
"""Elements of a block."""


def count_in(columns: int) -> int:
    """Returns how many blocks a row of ``columns`` elements has."""
    return -(-columns // SIZE)


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks of one width, beside each other in every row of a shard.

    Attributes:
        start: their first column in the shard.
        first: the number of the first block in the whole row.
        count: how many there are.
        width: columns of each.
    """

    start: int
    first: int
    count: int
    width: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the view ``[..., count, width]`` of a shard."""
        part = tensor.narrow(-1, self.start, self.count * self.width)
        blocks: torch.Tensor = part.unflatten(-1, (self.count, self.width))
        return blocks

    def scales(self, scales: torch.Tensor, first: int) -> torch.Tensor:
        """Returns their scales, ``[..., count]``, of those that begin with block ``first``."""
        return scales.narrow(-1, self.first - first, self.count)


class Blocks:
    """The blocks of one shard.

    Attributes:
        shape: of their scales: the shard's, with blocks for columns.
        first: the first of them in the whole row.
    """

    def __init__(self, held: Box) -> None:
        """Takes what the shard holds of its parameter."""
        self._columns = (held.start[-1], held.stop[-1])
        low, high = self._columns
        self.first = low // SIZE
        self.shape = (*held.size[:-1], max(count_in(high) - self.first, 0) if high > low else 0)
        self._runs = list(self._all_runs())

    def _all_runs(self) -> Iterator[_Run]:
        low, high = self._columns
        start = low
        if low % SIZE and low < high:  # the end of a block
            start = min(-(-low // SIZE) * SIZE, high)
            yield _Run(0, low // SIZE, 1, start - low)
        whole = (high - start) // SIZE
        if whole > 0:
            yield _Run(start - low, start // SIZE, whole, SIZE)
            start += whole * SIZE
        if start < high:
            yield _Run(start - low, start // SIZE, 1, high - start)

    def scales_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the largest magnitude in this shard's part of each block, fp32."""
        scales = torch.zeros(self.shape, dtype=torch.float32, device=numbers.device)
        for run in self._runs:
            run.scales(scales, self.first).copy_(_largest(run.of(numbers)))
        return scales

    def quantised(
        self, numbers: torch.Tensor, scales: torch.Tensor, *, signed: bool
    ) -> torch.Tensor:
        """Returns the code of each number by the scale of its block; of a block of zeros, of 0."""
        scales = torch.where(scales > 0, scales, 1.0)
        if len(self._runs) == 1:
            (run,) = self._runs
            parts = run.of(numbers) / run.scales(scales, self.first).unsqueeze(-1)
            return encoded(parts, signed=signed).flatten(-2)
        scaled = torch.empty_like(numbers)
        for run in self._runs:
            by = run.scales(scales, self.first).unsqueeze(-1)
            torch.div(run.of(numbers), by, out=run.of(scaled))
        return encoded(scaled, signed=signed)

    def dequantised(
        self, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool
    ) -> torch.Tensor:
        """Returns the number of each code, fp32."""
        numbers = decoded(codes, signed=signed)
        for run in self._runs:
            run.of(numbers).mul_(run.scales(scales, self.first).unsqueeze(-1))
        return numbers


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude along the last dim.

    By halves: elementwise maxima of long runs take a third of a reduction over short rows.
    """
    magnitudes = blocks.abs()
    while magnitudes.shape[-1] > 16 and magnitudes.shape[-1] % 2 == 0:
        magnitudes = torch.maximum(*magnitudes.chunk(2, dim=-1))
    return magnitudes.amax(dim=-1)
