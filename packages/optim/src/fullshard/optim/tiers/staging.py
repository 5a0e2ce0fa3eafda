"""Host buffers through which optimizer state travels between a file and a step.

``Staging`` owns a few buffers and lends them, one bucket of state at a time: read ahead, step,
write behind. Optimizers are unknown here. During a write the buffer is the only copy of its state.
After a failed write the caller takes the state over, before the buffer is used again. Between steps
buffers take no memory, as forward and backward need it, unless they are page-locked.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from time import perf_counter_ns

import torch

from fullshard.comm.spi import StreamEvent
from fullshard.optim.tiers.state_file import ALIGNMENT, Extent, StateFile

__all__ = ["Batch", "Rescue", "Staging"]

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
        last_of_step: whether the buffer is freed after the write, not used again.
        arrived: the end of a copy to the device; None: the batch was not copied.
    """

    extents: Sequence[Extent]
    views: Sequence[torch.Tensor]
    rescue: Rescue
    buffer: torch.Tensor
    moves: list[Future[None]] = field(default_factory=list)
    last_of_step: bool = False
    arrived: StreamEvent | None = None

    @property
    def memory(self) -> torch.Tensor:
        """The part of the buffer that the views fill."""
        return self.buffer[: sum(view.numel() for view in self.views)]

    def free(self) -> None:
        """Free the buffer, whose contents are in the file."""
        self.views, self.buffer = (), torch.empty(0, dtype=torch.uint8)


class Staging:
    """Host buffers for a few batches at once.

    Buffers are used again, but for those of the largest parameters, which are freed after use.

    Attributes:
        waited_ns: nanoseconds that the caller waited for the disk.
    """

    def __init__(self, file: StateFile, *, batches: int, kept_bytes: int, pin: bool) -> None:
        """Start without memory.

        Args:
            file: where state goes and comes from.
            batches: how many batches are in memory at once.
            kept_bytes: the size of the largest buffer that is used again, in bytes.
            pin: use page-locked memory, from which copies to a device are faster.
        """
        self._file = file
        self._pin = pin
        self._batches = batches
        self._kept_bytes = kept_bytes
        self._lent = 0
        self._free: list[torch.Tensor] = []
        self._written: deque[Batch] = deque()
        self.waited_ns = 0

    @property
    def nbytes(self) -> int:
        """The size of all buffers that are not in use now, in bytes."""
        return sum(buffer.numel() for buffer in self._free)

    def take(self, extents: Sequence[Extent], rescue: Rescue) -> Batch:
        """Return a batch for ``extents``, with undefined contents."""
        while self._lent == self._batches:
            self._finish_write()
        sizes = [extent.nbytes for extent in extents]
        nbytes = sum(sizes)
        fitting = [each for each in self._free if each.numel() >= nbytes]
        if fitting:
            buffer = min(fitting, key=torch.Tensor.numel)
        elif self._free and nbytes <= self._kept_bytes:
            buffer = min(self._free, key=torch.Tensor.numel)  # makes room for a larger one
        else:
            buffer = _new_buffer(nbytes, pin=self._pin)
        self._free = [each for each in self._free if each is not buffer]
        if buffer.numel() < nbytes:
            del buffer  # before there are two
            buffer = _new_buffer(nbytes, pin=self._pin)
        self._lent += 1
        return Batch(extents, list(buffer[:nbytes].split(sizes)), rescue, buffer)

    def settle(self, extents: Sequence[Extent]) -> None:
        """Wait for writes to ``extents``: a read must see them, and one may fail."""
        wanted = set(extents)
        while any(not wanted.isdisjoint(batch.extents) for batch in self._written):
            self._finish_write()

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
        self._release(batch)

    def end_step(self) -> None:
        """Free the buffers, those of the last writes as these end: they overlap with what follows.

        Page-locked buffers stay, since new ones are slow to make.
        """
        if self._pin:
            return
        self._free.clear()
        for batch in self._written:
            if not batch.last_of_step:
                batch.last_of_step = True
                batch.moves.append(self._file.after(batch.moves, batch.free))

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
        self._release(batch)

    def _release(self, batch: Batch) -> None:
        self._lent -= 1
        if batch.buffer.numel() <= self._kept_bytes and not batch.last_of_step:
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
        if pin:
            memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            start = -memory.data_ptr() % ALIGNMENT
            return memory[start : start + nbytes]
        # not of malloc, which keeps freed memory
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
