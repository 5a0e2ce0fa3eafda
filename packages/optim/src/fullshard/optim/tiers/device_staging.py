"""Device buffers through which optimizer state travels between host memory and a step.

``DeviceStaging`` has the methods of ``Staging``. Copies run on two streams, one for each direction,
and the host waits for none. [Note: order of copies] Each buffer has an event: the end of its last
use. A copy to the device waits for the event of its buffer, and a step waits for the copy. A copy
to the host waits for the step. The current stream waits for all copies at the end of a step, so
that buffers are freed in the order of that stream; copies of the next step wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns

import torch

from fullshard.comm import CommStreams
from fullshard.comm.spi import StreamEvent, traits_of
from fullshard.optim.tiers.host_memory import HostMemory
from fullshard.optim.tiers.staging import Batch, Rescue
from fullshard.optim.tiers.state_file import Extent

__all__ = ["DeviceStaging"]


class DeviceStaging:
    """Device buffers for a few batches at once, which exist during a step only.

    Attributes:
        waited_ns: nanoseconds that the host waited for copies.
        nbytes: 0: between steps there are no buffers.
    """

    nbytes = 0

    def __init__(self, memory: HostMemory) -> None:
        """Start without buffers; ``memory``: where state goes and comes from."""
        self.waited_ns = 0
        self._memory = memory
        self._streams: CommStreams | None = None
        self._free: list[tuple[torch.Tensor, StreamEvent]] = []
        self._copied: StreamEvent | None = None  # the end of the last copy to the host

    def _of_device(self) -> CommStreams:
        """Return the streams of the device; ``copy_in`` and ``reduce`` serve the two directions."""
        if self._streams is None:
            self._streams = CommStreams(self._memory.device or torch.device("cpu"))
        return self._streams

    def _take(self, nbytes: int) -> tuple[torch.Tensor, StreamEvent]:
        """Return a buffer, and the event that its next use waits for."""
        if self._free:
            buffer, event = self._free.pop(0)  # the one whose last use began first
            if buffer.numel() >= nbytes:
                return buffer, event
            self._streams_wait(event)
            del buffer  # on the current stream, after its last use
        device = self._memory.device
        with torch.inference_mode(False):
            made = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return made, self._of_device().record()

    def _streams_wait(self, event: StreamEvent) -> None:
        self._of_device().current().wait_event(event)

    def take(self, extents: Sequence[Extent], rescue: Rescue) -> Batch:
        """Return a batch for ``extents``, with undefined contents, for the current stream."""
        batch, event = self._batch(extents, rescue)
        self._streams_wait(event)
        return batch

    def _batch(self, extents: Sequence[Extent], rescue: Rescue) -> tuple[Batch, StreamEvent]:
        sizes = [extent.nbytes for extent in extents]
        buffer, event = self._take(sum(sizes))
        views = list(buffer[: sum(sizes)].split(sizes)) if sizes else []
        return Batch(extents, views, rescue, buffer), event

    def settle(self, extents: Sequence[Extent]) -> None:
        """Do nothing: copies of equal extents are in order."""

    def read(self, extents: Sequence[Extent], rescue: Rescue) -> Batch:
        """Begin to copy a batch to the device; ``wait`` orders the step after the copy."""
        if not extents:
            return Batch(extents, [], rescue, torch.empty(0, dtype=torch.uint8))
        streams = self._of_device()
        batch, event = self._batch(extents, rescue)
        streams.copy_in.wait_event(event)
        with streams.use(streams.copy_in):
            self._memory.read(extents, batch.memory)
        batch.arrived = streams.record(streams.copy_in)
        return batch

    def wait(self, batch: Batch) -> None:
        """Let the current stream wait for the copy of ``batch`` to the device."""
        if batch.arrived is not None:
            self._streams_wait(batch.arrived)

    def write(self, batch: Batch) -> None:
        """Begin to copy ``batch`` to the host, after what the current stream does with it."""
        if not batch.extents:
            return
        streams = self._of_device()
        streams.reduce.wait_event(streams.record())
        with streams.use(streams.reduce):
            self._memory.write(batch.extents, batch.memory)
        self._free.append((batch.buffer, streams.record(streams.reduce)))

    def drop(self, batch: Batch) -> None:
        """Free the buffer of ``batch`` without a copy to the host."""
        if batch.extents:
            self.wait(batch)
            self._free.append((batch.buffer, self._of_device().record()))

    def end_step(self) -> None:
        """Let the current stream wait for all copies, and free the buffers."""
        if self._free:
            streams = self._of_device()
            self._copied = streams.record(streams.reduce)
            for _, event in self._free:
                self._streams_wait(event)
            self._free.clear()

    def drain(self) -> None:
        """Block the host until all copies to it are done."""
        self.end_step()
        if self._copied is not None:
            start = perf_counter_ns()
            self._copied.synchronize()
            device = self._memory.device
            if device is not None and not traits_of(device).streams:
                torch.get_device_module(device).synchronize()
            self.waited_ns += perf_counter_ns() - start
            self._copied = None
