"""A few blocks of memory that are used one after the other, on devices without streams.

Owns: which block serves next. New memory each time costs page faults; there are as many blocks as
were ever in use at once, each as large as it had to be. Refuses: knowing how one is made, what lies
in it, and when a use is over: who took it gives it back then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["BlockPool", "Loan"]


@dataclass(frozen=True)
class Loan:
    """Memory for one use.

    Attributes:
        data: flat, of the dtype that was asked for.
        block: what it is part of, ``[n]`` uint8; None where it is ``data``'s own.
        pool: whose block it is; None: it is freed after use.
    """

    data: torch.Tensor
    block: torch.Tensor | None = None
    pool: BlockPool | None = None

    def end(self) -> None:
        """Gives it back: nobody reads or writes it any more."""
        if self.pool is not None and self.block is not None:
            self.pool.give_back(self.block)


def _nothing(block: torch.Tensor) -> None:
    """Stands for nobody who wants to know."""


class BlockPool:
    """Blocks that nobody uses now: ``free``.

    Args:
        dropped: is told of a block that will not come back.
    """

    def __init__(self, dropped: Callable[[torch.Tensor], None] = _nothing) -> None:
        self.free: list[torch.Tensor] = []
        self._dropped = dropped

    def take(self, nbytes: int) -> torch.Tensor | None:
        """The smallest block of ``nbytes`` at least, until it is given back.

        None if there is none: then make one. One that is too small makes room for it.
        """
        best, place = 0, -1
        for index, block in enumerate(self.free):
            numel = block.numel()
            if numel >= nbytes and (place < 0 or numel < best):
                best, place = numel, index
        if place < 0 and self.free:
            self._dropped(self.free.pop())
        return None if place < 0 else self.free.pop(place)

    def lend(self, numel: int, dtype: torch.dtype, new: Callable[[int], torch.Tensor]) -> Loan:
        """Memory for ``numel`` elements, in a free block or in what ``new(nbytes)`` makes."""
        nbytes = numel * dtype.itemsize
        block = self.take(nbytes)
        if block is None:
            with torch.inference_mode(False):  # an inference tensor is not written in training
                block = new(nbytes)
        return Loan(block.narrow(0, 0, nbytes).view(dtype), block, self)

    def give_back(self, block: torch.Tensor) -> None:
        """Takes a block, ``[n]`` uint8, that nobody uses any more."""
        self.free.append(block)

    def clear(self) -> None:
        """Frees all of them."""
        while self.free:
            self._dropped(self.free.pop())

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that nobody uses now."""
        return sum(block.numel() for block in self.free)
