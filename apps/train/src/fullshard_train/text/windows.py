"""Which windows of a text a step reads: a fixed order that knows nothing of ranks.

Owns the order. Window number `i` of a run does not depend on the world size or on the place of a
restart, because it is a function of the seed and of `i` only; each rank then takes its rows of the
global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from fullshard_train.errors import TrainError
from fullshard_train.seeds import derive_seed, generator_for

__all__ = ["ShuffledWindows", "cut", "evenly_spaced"]


class ShuffledWindows:
    """An endless, seeded sequence of windows; each epoch reads the text once, in a new order.

    A window is `context` bytes and the byte after each. An epoch divides the text, from its own
    offset, into windows without overlap; no two windows of an epoch, and no two ranks of a step,
    therefore learn to predict one byte twice.

    Raises:
        TrainError: the text is too short for one window.
    """

    def __init__(self, length: int, *, context: int, seed: int) -> None:
        if length < 2 * context:
            raise TrainError(
                f"data: {length} bytes to train on are too few for windows of {context}: give more"
                " data, or a smaller model.context"
            )
        self.context = context
        self.seed = seed
        self.per_epoch = (length - context) // context
        # An order is one number per window; two are in use only where a batch spans two epochs.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def starts(self, numbers: Sequence[int]) -> torch.Tensor:
        """Where the windows of these numbers start, int64 of shape `[len(numbers)]`."""
        return torch.tensor([self._start(number) for number in numbers], dtype=torch.int64)

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.per_epoch)
        offset = derive_seed(self.seed, "offset", epoch) % self.context
        return offset + self.context * int(self._order(epoch)[place])

    def _shuffle(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self.per_epoch, generator=generator_for(self.seed, "order", epoch))


def evenly_spaced(length: int, *, context: int, count: int) -> torch.Tensor:
    """Where at most `count` windows start, evenly over a text, without overlap: int64 `[windows]`.

    Raises:
        TrainError: the text is too short for one window.
    """
    available = (length - 1) // context
    if available < 1:
        raise TrainError(
            f"data: {length} held-out bytes are too few for a window of {context}: give more data,"
            " or a smaller data.held_out_every or model.context"
        )
    chosen = min(available, count)
    return torch.arange(chosen) * available // chosen * context


def cut(
    text: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of the windows at `starts`, both int64 of shape `[len(starts), context]`.

    Target `t` of a window is the byte after its input `t`.
    """
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
