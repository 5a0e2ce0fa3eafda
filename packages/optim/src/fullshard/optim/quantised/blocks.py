"""Blocks: 256 elements of a row of the whole parameter, quantised by the largest of them.

Owns what becomes of the blocks of a shard; ``fullshard.wire.runs`` knows where they lie in it.
"""

from __future__ import annotations

import torch

from fullshard.checkpoint.boxes import Box
from fullshard.optim.quantised.dynamic_map import decoded, encoded
from fullshard.wire.runs import runs_of

__all__ = ["SIZE", "Blocks", "count_in"]

SIZE = 256
"""Elements of a block."""


def count_in(columns: int) -> int:
    """Returns how many blocks a row of ``columns`` elements has."""
    return -(-columns // SIZE)


class Blocks:
    """The blocks of one shard.

    Attributes:
        shape: of their scales: the shard's, with blocks for columns.
        first: the first of them in the whole row.
    """

    def __init__(self, held: Box) -> None:
        """Takes what the shard holds of its parameter."""
        low, high = held.start[-1], held.stop[-1]
        self.first = low // SIZE
        self.shape = (*held.size[:-1], max(count_in(high) - self.first, 0) if high > low else 0)
        self._runs = runs_of(low, high, SIZE)

    def scales_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the largest magnitude in this shard's part of each block, fp32."""
        scales = torch.zeros(self.shape, dtype=torch.float32, device=numbers.device)
        for run in self._runs:
            run.scales(scales).copy_(_largest(run.of(numbers)))
        return scales

    def quantised(
        self, numbers: torch.Tensor, scales: torch.Tensor, *, signed: bool
    ) -> torch.Tensor:
        """Returns the code of each number by the scale of its block; of a block of zeros, of 0."""
        scales = torch.where(scales > 0, scales, 1.0)
        if len(self._runs) == 1:
            (run,) = self._runs
            parts = run.of(numbers) / run.scales(scales).unsqueeze(-1)
            return encoded(parts, signed=signed).flatten(-2)
        scaled = torch.empty_like(numbers)
        for run in self._runs:
            by = run.scales(scales).unsqueeze(-1)
            torch.div(run.of(numbers), by, out=run.of(scaled))
        return encoded(scaled, signed=signed)

    def dequantised(
        self, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool
    ) -> torch.Tensor:
        """Returns the number of each code, fp32."""
        numbers = decoded(codes, signed=signed)
        for run in self._runs:
            run.of(numbers).mul_(run.scales(scales).unsqueeze(-1))
        return numbers


def _largest(blocks: torch.Tensor) -> torch.Tensor:
    """Returns the largest magnitude along the last dim.

    By halves: elementwise maxima of long runs take a third of a reduction over short rows.
    """
    magnitudes = blocks.abs()
    while magnitudes.shape[-1] > 16 and magnitudes.shape[-1] % 2 == 0:
        magnitudes = torch.maximum(*magnitudes.chunk(2, dim=-1))
    return magnitudes.amax(dim=-1)
