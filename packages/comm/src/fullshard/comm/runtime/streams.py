"""The named streams of communication, and who keeps a buffer alive while two of them use it.

Owns: copy-in, gather, reduce and all-reduce streams behind one device-neutral interface, and
buffers in retirement. On CPU the streams are null objects and overlap comes from asynchronous work
handles. Refuses: deciding what runs where.

[Note: a buffer lives on one stream]
A buffer is allocated and freed on one stream, its owner, whose allocator pool it comes from. When
another stream reads or writes it, that stream first waits for an event of the owner. When the other
stream is done, the buffer is *retired* with an event of that stream; the reference is kept until
the owner has been made to wait for that event (``collect``). Only then may the memory go back to
the owner's pool. ``Tensor.record_stream`` is never used: it frees at an unforeseeable time, which
fragments memory.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
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

    def record_event(self, event: Any = None, /) -> Any:
        """An event at the present end of the queue."""


class NullEvent:
    """An event on a device whose work is done when the call returns."""

    __slots__ = ()

    def synchronize(self) -> None:
        """Return at once: the work is complete."""


class NullStream:
    """A stream of a device without streams: everything is in order already."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: Any, /) -> None:
        """Do nothing: all work is in order."""

    def record_event(self, event: Any = None, /) -> NullEvent:
        """An event that is reached already."""
        return _NULL_EVENT

    def __repr__(self) -> str:
        """The name."""
        return f"NullStream({self.name!r})"


_NULL_EVENT = NullEvent()


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


class CommStreams:
    """Four streams for one device, and the buffers that are in retirement on them.

    Attributes:
        copy_in: packs shards and owns gather buffers.
        gather: runs all-gathers.
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
        self._retired: defaultdict[Stream, list[tuple[StreamEvent, tuple[torch.Tensor, ...]]]]
        self._retired = defaultdict(list)  # by owner
        has_streams = traits_of(self.device).streams
        self._module: Any = torch.get_device_module(self.device) if has_streams else None
        self.asynchronous_work = self._module is None
        self._null_current = NullStream("current")
        self.copy_in: Stream = self._new("copy_in")
        self.gather: Stream = self._new("gather")
        self.reduce: Stream = self._new("reduce")
        self.all_reduce: Stream = self._new("all_reduce")

    @classmethod
    @functools.cache
    def shared(cls, device: torch.device) -> CommStreams:
        """Return the shared streams of a device, for callers without their own: streams are costly.

        Args:
            device: a canonical one.
        """
        return cls(device)

    def _new(self, name: str) -> Stream:
        if self._module is None:
            return NullStream(name)
        # High priority: a short copy or a collective's launch must not queue behind the layers
        # computed meanwhile.
        return cast("Stream", self._module.Stream(device=self.device, priority=-1))

    @property
    def retired(self) -> int:
        """How many batches of buffers are in retirement."""
        return sum(map(len, self._retired.values()))

    def current(self) -> Stream:
        """The stream on which the caller's work runs now."""
        if self._module is None:
            return self._null_current
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
        return cast("AbstractContextManager[object]", self._module.stream(stream))

    def retire(self, tensors: Iterable[torch.Tensor], owner: Stream, after: StreamEvent) -> None:
        """Keep ``tensors`` alive until ``collect(owner)`` has made their owner wait for ``after``.

        A device without streams needs no waiting, so tensors are not kept. See [Note: a buffer
        lives on one stream].
        """
        if self._module is not None:
            self._retired[owner].append((after, tuple(tensors)))

    def collect(self, owner: Stream, *, keep: int = 0) -> None:
        """Make ``owner`` wait for what its retired buffers were retired after, and drop them.

        Call it before ``owner`` allocates, so that it can have the memory back.

        Args:
            owner: the stream whose buffers to drop.
            keep: leave this many of its newest batches in retirement, without waiting for them.
        """
        batches = self._retired[owner]
        while len(batches) > keep:
            after, _ = batches[0]
            owner.wait_event(after)
            del batches[0]

    def collect_all(self) -> None:
        """Drop every retired buffer, its owner waiting as in ``collect``; for the end of a step."""
        for owner in self._retired:
            self.collect(owner)

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
