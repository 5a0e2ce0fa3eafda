"""A store that is wrong on purpose, to show that the storage tests can fail.

It gives the memory of a group to the next group that is gathered.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from fullshard.sharding.gather.strategy import UnshardedMemory

__all__ = ["RotatingStore"]

_RING = 3  # buffers that all groups take turns with
_BYTES = 1 << 16


class RotatingStore(UnshardedMemory):
    """Every gather fills the next buffer of a ring that all groups share, which is wrong.

    An alias that a graph saved in forward points to the buffer of then, in which another group's
    parameters lie by the time of backward.
    """

    ring: ClassVar[list[torch.Tensor]] = []
    turn: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._gone = True

    def allocate(self) -> None:
        """Moves parameters and fills to the next buffer."""
        if not self._gone:
            return
        kind = type(self)
        if not kind.ring:
            kind.ring.extend(torch.zeros(_BYTES, dtype=torch.uint8) for _ in range(_RING))
        buffer = kind.ring[kind.turn % _RING]
        kind.turn += 1
        start = 0
        for index, spec in enumerate(self.specs):
            nbytes = spec.numel * spec.dtype.itemsize
            view = buffer[start : start + nbytes].view(spec.dtype).view(spec.shape)
            self.fills[index] = view
            self.params[index].data = view
            start += -(-nbytes // 64) * 64
        self._gone = False

    def free(self) -> None:
        """Leaves the buffer to whoever comes next."""
        self._gone = True
