"""Host buffers through which optimizer state travels between a file and a step.

``Staging`` owns a few buffers and lends them, one bucket of state at a time: read ahead, step,
write behind. Optimizers are unknown here. During a write the buffer is the only copy of its state.
After a failed write the caller takes the state over, before the buffer is used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from time import perf_counter_ns

import torch

from fullshard.optim.tiers.state_file import ALIGNMENT, Extent, StateFile

__all__ = ["Batch", "Staging"]

Rescue = Callable[["Batch", OSError], None]
"""Called with a batch whose write failed; the buffer is reused after it."""


@dataclass(eq=False)
class Batch:
    """State of one bucket in one buffer.

    Attributes:
        extents: the places of the tensors in the file.
        views: one view of the buffer for each extent, ``[extent.nbytes]`` uint8.
        rescue: the function that takes the state over if the write fails.
        buffer: the whole buffer.
        moves: the reads or writes that are in progress.
    """

    extents: Sequence[Extent]
    views: Sequence[torch.Tensor]
    rescue: Rescue
    buffer: torch.Tensor
    moves: list[Future[None]] = field(default_factory=list)

    @property
    def memory(self) -> torch.Tensor:
        """The part of the buffer that the views fill."""
        return self.buffer[: sum(view.numel() for view in self.views)]


class Staging:
    """A ring of host buffers; each grows to the largest bucket.

    Attributes:
        waited_ns: nanoseconds that the caller waited for the disk.
    """

    def __init__(self, file: StateFile, *, buffers: int, pin: bool) -> None:
        """Start without memory.

        Args:
            file: where state goes and comes from.
            buffers: how many batches are in memory at once.
            pin: use page-locked memory, from which copies to a device are faster.
        """
        self._file = file
        self._pin = pin
        self._free = [_new_buffer(0, pin=False) for _ in range(buffers)]
        self._written: deque[Batch] = deque()
        self.waited_ns = 0

    @property
    def nbytes(self) -> int:
        """The size of all buffers that are not in use now, in bytes."""
        return sum(buffer.numel() for buffer in self._free)

    def take(self, extents: Sequence[Extent], rescue: Rescue) -> Batch:
        """Return a batch for ``extents``, with undefined contents."""
        while not self._free:
            self._finish_write()
        buffer, nbytes = self._free.pop(), sum(extent.nbytes for extent in extents)
        if buffer.numel() < nbytes:
            del buffer  # before there are two
            buffer = _new_buffer(nbytes, pin=self._pin)
        views = list(buffer[:nbytes].split([extent.nbytes for extent in extents]))
        return Batch(extents, views, rescue, buffer)

    def read(self, extents: Sequence[Extent], rescue: Rescue) -> Batch:
        """Begin to read a batch, and return the batch; ``wait`` waits for the read."""
        batch = self.take(extents, rescue)
        batch.moves = self._file.read(extents, batch.memory)
        return batch

    def wait(self, batch: Batch) -> None:
        """Wait for the read of ``batch``.

        Raises:
            OSError: if the read failed.
        """
        self._wait(batch)

    def write(self, batch: Batch) -> None:
        """Begin to write ``batch``; its buffer is free again after the write."""
        batch.moves = self._file.write(batch.extents, batch.memory)
        self._written.append(batch)

    def drop(self, batch: Batch) -> None:
        """Free the buffer of ``batch`` without a write, when no thread fills it any more."""
        wait(batch.moves)
        self._free.append(batch.buffer)

    def drain(self) -> None:
        """Wait for all writes."""
        while self._written:
            self._finish_write()

    def _finish_write(self) -> None:
        batch = self._written.popleft()
        try:
            self._wait(batch)
        except OSError as error:
            batch.rescue(batch, error)
        self._free.append(batch.buffer)

    def _wait(self, batch: Batch) -> None:
        start = perf_counter_ns()
        moves, batch.moves = batch.moves, []
        errors = [error for each in moves if (error := each.exception()) is not None]
        self.waited_ns += perf_counter_ns() - start
        if errors:
            raise errors[0]


def _new_buffer(nbytes: int, *, pin: bool) -> torch.Tensor:
    """Return ``[nbytes]`` uint8 on the host, at an address that direct I/O can use."""
    with torch.inference_mode(False):
        memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=pin)
        start = -memory.data_ptr() % ALIGNMENT
        return memory[start : start + nbytes]
