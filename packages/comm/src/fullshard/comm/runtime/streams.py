"""The named streams of communication, and who keeps a buffer alive while two of them use it.

Owns: copy-in, gather, reduce and all-reduce streams behind one device-neutral interface, and when a
buffer may be freed. On CPU the streams are null objects and overlap comes from asynchronous work
handles. Refuses: deciding what runs where.

[Note: a buffer lives on one stream]
A buffer is allocated and freed on one stream, its owner, whose allocator pool it comes from. When
another stream reads or writes it, that stream first waits for an event of the owner. When the other
stream is done, the owner is made to wait for an event of that stream (``retire``). Only then may
the memory go back to the owner's pool. ``Tensor.record_stream`` is never used: it frees at an
unforeseeable time, which fragments memory.

The inputs of reductions have an owner that runs nothing. The owner can therefore wait
for a collective as soon as the collective is launched, without any delay of a computation.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.runtime.ranges import NOTHING

__all__ = ["CommStreams", "NullEvent", "NullStream", "Stream", "StreamEvent", "canonical_device"]


class StreamEvent(Protocol):
    """A point in a stream's work that others can wait for."""

    def synchronize(self) -> None:
        """Block the host until the point is reached."""


class Stream(Protocol):
    """A queue of device work. ``torch.cuda.Stream`` and its like satisfy this."""

    def wait_event(self, event: Any, /) -> None:
        """Let work queued from now on run after ``event``; the host does not block."""

    def record_event(self) -> Any:
        """An event at the present end of the queue."""


class NullEvent:
    """An event on a device whose work is done when the call returns."""

    __slots__ = ()

    def synchronize(self) -> None:
        """Return at once: the work is complete."""


class NullStream:
    """A stream of a device without streams: everything is in order already."""

    __slots__ = ()

    def wait_event(self, event: Any, /) -> None:
        """Do nothing: all work is in order."""

    def record_event(self) -> NullEvent:
        """An event that is reached already."""
        return _NULL_EVENT


_NULL_EVENT = NullEvent()
_NULL_STREAM = NullStream()


def canonical_device(device: torch.device) -> torch.device:
    """``device`` as tensors report it: ``cpu`` without an index, accelerators with one.

    An accelerator without an index means its current device.
    """
    if not traits_of(device).numbered:
        return torch.device(device.type)
    if device.index is None:
        module = torch.get_device_module(device)
        return torch.device(device.type, module.current_device())
    return device


class _Current(AbstractContextManager[None]):
    """A context in which a stream of an accelerator is the current one of its device."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device_index)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.accelerator.set_stream(self._before)
        if self._device != self._stream.device_index:  # setting a stream sets its device, too
            torch.accelerator.set_device_index(self._device)


class CommStreams:
    """The streams of communication for one device, and the buffers that are in retirement on them.

    Attributes:
        copy_in: packs shards and owns gather buffers.
        gather: runs all-gathers.
        inputs: owns the inputs of reductions, and runs nothing.
        reduce: runs reduce-scatters and owns their outputs.
        all_reduce: runs all-reduces over replicas.
        asynchronous_work: whether overlap must come from asynchronous work, because the device has
            no streams.

    Args:
        device: where the tensors are. Accelerators get real streams of high priority; CPU gets null
            streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = canonical_device(device)
        self._retired: defaultdict[Stream, list[tuple[StreamEvent, torch.Tensor]]]
        self._retired = defaultdict(list)  # by owner
        has_streams = traits_of(self.device).streams
        self._module: Any = torch.get_device_module(self.device) if has_streams else None
        self.asynchronous_work = self._module is None
        self.copy_in: Stream = self._new()
        self.gather: Stream = self._new()
        self.inputs: Stream = self._new()
        self.reduce: Stream = self._new()
        self.all_reduce: Stream = self._new()
        # torch.accelerator asks in C++, several times as fast as a device's module, but knows one
        # type of device: not CUDA, where a program has loaded another accelerator as well.
        accelerator = torch.accelerator.current_accelerator()
        known = accelerator is not None and accelerator.type == self.device.type
        self._in_cpp = known and isinstance(self.copy_in, torch.Stream)

    @classmethod
    @functools.cache
    def shared(cls, device: torch.device) -> CommStreams:
        """Return the shared streams of a device, for callers without their own: streams are costly.

        Args:
            device: a canonical one.
        """
        return cls(device)

    def _new(self) -> Stream:
        if self._module is None:
            return _NULL_STREAM
        # High priority: a short copy or a collective's launch must not queue behind the layers
        # computed meanwhile.
        stream = self._module.Stream(device=self.device, priority=-1)
        if isinstance(stream, torch.Stream):  # the same one, whose methods are all in C++
            return torch.Stream(
                stream_id=stream.stream_id,
                device_index=stream.device_index,
                device_type=stream.device_type,
            )
        return cast("Stream", stream)

    @property
    def retired(self) -> int:
        """How many buffers are held back in retirement."""
        return sum(map(len, self._retired.values()))

    def current(self) -> Stream:
        """The stream on which the caller's work runs now."""
        if self._module is None:
            return _NULL_STREAM
        if self._in_cpp:
            return torch.accelerator.current_stream(self.device.index)
        return cast("Stream", self._module.current_stream(self.device))

    def record(self, stream: Stream | None = None) -> StreamEvent:
        """An event at the present end of ``stream`` (of the current stream if None)."""
        if self._module is None:
            return _NULL_EVENT
        event = (self.current() if stream is None else stream).record_event()
        return cast("StreamEvent", event)

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """A context in which ``stream`` is current."""
        if self._module is None:
            return NOTHING
        if self._in_cpp:
            return _Current(cast("torch.Stream", stream))
        return cast("AbstractContextManager[object]", self._module.stream(stream))

    def retire(
        self, buffer: torch.Tensor, owner: Stream, after: StreamEvent, *, keep: int = 0
    ) -> None:
        """End the use of a buffer: let its owner wait for ``after``, and drop the reference.

        A device without streams needs no waiting. See [Note: a buffer lives on one stream].

        Args:
            buffer: the memory, to which the caller keeps no other reference.
            owner: the stream that allocated it.
            after: the last use on another stream.
            keep: hold this many of the owner's newest buffers back, without waiting for them.
        """
        if self._module is not None:
            self._retired[owner].append((after, buffer))
            self._collect(owner, keep)

    def _collect(self, owner: Stream, keep: int) -> None:
        buffers = self._retired[owner]
        while len(buffers) > keep:
            after, _ = buffers[0]
            owner.wait_event(after)
            del buffers[0]

    def collect_all(self) -> None:
        """Drop what ``retire`` held back, its owner waiting; for the end of a step."""
        for owner in self._retired:
            self._collect(owner, 0)

    def synchronize_with_current(self, event: StreamEvent | None = None) -> None:
        """Make copy-in and gather wait for the current stream; call it once before a root forward.

        After it, gathers see what the optimizer, running on the current stream, wrote to the
        shards.

        Args:
            event: wait for this instead of all that the current stream holds now.
        """
        if self._module is not None:
            event = self.record() if event is None else event
            self.copy_in.wait_event(event)
            self.gather.wait_event(event)
