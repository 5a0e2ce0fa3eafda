"""A few blocks of memory that are used one after the other, on devices without streams.

Owns: which block serves next. New memory each time costs page faults; there are as many blocks as
were ever in use at once, each as large as it had to be. Refuses: making them, knowing what lies in
them, and when a use is over: who took one gives it back then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["BlockPool", "new_block"]


def new_block(nbytes: int, device: torch.device) -> torch.Tensor:
    """New memory of ``nbytes``, ``[nbytes]`` uint8, to be written in training and in inference."""
    with torch.inference_mode(False):  # an inference tensor could not be written in training
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _nothing(block: torch.Tensor) -> None:
    """Stands for nobody who wants to know."""


class BlockPool:
    """Blocks that nobody uses now.

    Args:
        dropped: is told of a block that will not come back.
    """

    def __init__(self, dropped: Callable[[torch.Tensor], None] = _nothing) -> None:
        self._free: list[torch.Tensor] = []
        self._dropped = dropped

    def take(self, nbytes: int) -> torch.Tensor | None:
        """The smallest block of ``nbytes`` at least, until it is given back.

        None if there is none: then make one. One that is too small makes room for it.
        """
        fitting = [
            (block.numel(), place)
            for place, block in enumerate(self._free)
            if block.numel() >= nbytes
        ]
        if fitting:
            return self._free.pop(min(fitting)[1])
        if self._free:
            self._dropped(self._free.pop())
        return None

    def give_back(self, block: torch.Tensor) -> None:
        """Takes a block, ``[n]`` uint8, that nobody uses any more."""
        self._free.append(block)

    def clear(self) -> None:
        """Frees all of them."""
        while self._free:
            self._dropped(self._free.pop())

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that nobody uses now."""
        return sum(block.numel() for block in self._free)
