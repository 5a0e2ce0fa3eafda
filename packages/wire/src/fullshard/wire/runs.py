"""The positions of a row's blocks in a part of the row: runs of blocks of one width.

Owns that arithmetic. Blocks are counted from the start of the *whole* row, so that no cut changes
them; a part that is cut inside a block holds the end or the beginning of a block. Refuses: knowing
what becomes of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Run", "runs_of"]


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent blocks of one width in every row of a part.

    Attributes:
        start: their first column in the part.
        first: the index of the first block's scale among the scales of a row of the part.
        count: how many there are.
        width: columns of each.
    """

    start: int
    first: int
    count: int
    width: int

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """Return the view ``[..., count, width]`` of a part, ``[..., columns]``."""
        columns = part.narrow(-1, self.start, self.count * self.width)
        return columns.unflatten(-1, (self.count, self.width))  # type: ignore[no-any-return]  # torch does not say

    def scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Return this run's scales, ``[..., count]``, among a part's scales, ``[..., blocks]``."""
        return scales.narrow(-1, self.first, self.count)


def runs_of(low: int, high: int, size: int) -> tuple[Run, ...]:
    """Return the blocks of columns ``low`` to ``high`` of a row that has some of ``size``."""
    runs, at, first = [], low, 0
    while at < high:
        if at % size or high - at < size:  # the end of a block, or its beginning
            count, width = 1, min(size - at % size, high - at)
        else:
            count, width = (high - at) // size, size
        runs.append(Run(at - low, first, count, width))
        at += count * width
        first += count
    return tuple(runs)
