"""Blocks: 256 elements of a row of the whole parameter, which have a scale, the largest of them.

Owns the scales of a shard's blocks; ``fullshard.wire.runs`` computes where they are in the shard.
"""

from __future__ import annotations

import torch

from fullshard.wire.spi import runs_of

__all__ = ["SIZE", "Blocks", "count_in", "shortest_rows"]

SIZE = 256
"""Elements of a block."""


def count_in(columns: int) -> int:
    """Return how many blocks a row of ``columns`` elements has."""
    return -(-columns // SIZE)


def shortest_rows(low: int, high: int) -> tuple[int, int]:
    """Return the columns of the shortest rows that have the blocks of columns ``low`` to ``high``.

    If all blocks have one width, each may be a row of its own: rows of any length are alike so.
    """
    runs = runs_of(low, high, SIZE)
    return (0, runs[0].width) if len(runs) == 1 else (low, high)


class Blocks:
    """The blocks in some columns of rows.

    Attributes:
        columns: how many columns.
        count: how many blocks a row has there, and so scales.
    """

    def __init__(self, low: int, high: int) -> None:
        """Take the first column, as counted in the whole row, and where they end."""
        self._runs = runs_of(low, high, SIZE)
        self.columns = high - low
        self.count = sum(run.count for run in self._runs)

    def scales_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude in these columns of each block, fp32."""
        shape = (*numbers.shape[:-1], self.count)
        scales = torch.zeros(shape, dtype=torch.float32, device=numbers.device)
        for run in self._runs:
            run.scales(scales).copy_(run.of(numbers).abs().amax(dim=-1))
        return scales

    def divide(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        """Divide ``numbers`` by the scales of their blocks; those of a block of zeros, by 1."""
        scales = torch.where(scales > 0, scales, 1.0)
        for run in self._runs:
            run.of(numbers).div_(run.scales(scales).unsqueeze(-1))

    def multiply(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        """Multiply ``numbers`` by the scales of their blocks."""
        for run in self._runs:
            run.of(numbers).mul_(run.scales(scales).unsqueeze(-1))
