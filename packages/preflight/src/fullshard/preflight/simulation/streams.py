"""Streams and events that run nothing: they keep account of which work is ordered after which.

Owns vector clocks (Lamport 1978; Fidge 1988; Mattern 1989). Work that is queued on a stream is
numbered. A clock holds, for each stream, the number of the last piece of work that is known to be
over; waiting for an event joins the event's clock into the waiting stream's. The host is one more
actor: when the host has waited for work, that work is over for all work that the host queues later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fullshard.preflight.simulation.backward import GraphStreams

__all__ = ["Actor", "Clock", "Machine", "SimulatedEvent", "SimulatedStream", "join"]

Clock = dict[int, int]
"""By an actor's number, up to which of its work all is over; what is missing is 0."""


def join(into: Clock, other: Clock) -> None:
    """Add to ``into`` what ``other`` knows."""
    for number, time in other.items():
        if time > into.get(number, 0):
            into[number] = time


class Actor:
    """An executor of work in order: a stream, or the host.

    Attributes:
        number: its own among all of a machine.
        name: for reports.
        clock: work that is over before the next piece of work starts.
    """

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.clock: Clock = {}

    @property
    def time(self) -> int:
        """The number of the work that it was given last."""
        return self.clock.get(self.number, 0)

    def tick(self) -> int:
        """Numbers its next piece of work."""
        self.clock[self.number] = time = self.time + 1
        return time

    def is_after(self, number: int, time: int) -> bool:
        """Return whether the next piece of work comes after the numbered work of another actor."""
        return self.clock.get(number, 0) >= time


class SimulatedEvent:
    """A point in a stream's work. Has the methods of ``torch.Event``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.clock: Clock | None = None  # never recorded: nothing to wait for

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Move it to the present end of ``stream``; of the current one if None."""
        self._machine.before()
        self.clock = dict((self._machine.current() if stream is None else stream).clock)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Make ``stream`` wait, the current one if None."""
        (self._machine.current() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait."""
        self._machine.host_waits(self.clock or {})

    def query(self) -> bool:
        """True: the work is over, and from now on the host knows that it is."""
        self.synchronize()
        return True


class SimulatedStream(Actor):
    """A queue of device work. Has the methods of ``torch.Stream``, and is a context as it is."""

    def __init__(self, machine: Machine, number: int, name: str) -> None:
        super().__init__(number, name)
        self._machine = machine
        self._entered: list[Any] = []

    def wait_event(self, event: Any) -> None:
        """Let work queued from now on run after ``event``."""
        self._machine.before()
        join(self.clock, event.clock or {})

    def wait_stream(self, stream: SimulatedStream) -> None:
        """Let work queued from now on run after all that ``stream`` holds now."""
        self._machine.before()
        join(self.clock, stream.clock)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """An event at the present end of the queue."""
        event = SimulatedEvent(self._machine) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait until the queue is empty."""
        self._machine.host_waits(self.clock)

    def query(self) -> bool:
        """True: the queue is empty, and from now on the host knows that it is."""
        self.synchronize()
        return True

    def __enter__(self) -> SimulatedStream:
        context = self._machine.using(self)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def __repr__(self) -> str:
        """The name."""
        return f"SimulatedStream({self.name!r})"


class Machine:
    """A simulated device, and the host that queues work on the device.

    Attributes:
        host: the actor of what the host does itself.
        streams: all streams; the first is the default one.
        graph: which stream the parts of a backward belong to.
        before: called before any clock changes, with the state before the change.
    """

    def __init__(self) -> None:
        self.host = Actor(0, "host")
        self.streams: list[SimulatedStream] = []
        self.default = self.stream("default")
        self.graph = GraphStreams(self.default)
        self.before: Callable[[], None] = _nothing
        self._local = threading.local()

    def stream(self, name: str = "") -> SimulatedStream:
        """A new stream."""
        number = len(self.streams) + 1
        self.streams.append(SimulatedStream(self, number, name or f"stream {number}"))
        return self.streams[-1]

    def _stack(self) -> list[tuple[SimulatedStream, object]]:
        if not hasattr(self._local, "stack"):
            self._local.stack = [(self.default, None)]
        stack: list[tuple[SimulatedStream, object]] = self._local.stack
        return stack

    def current(self) -> SimulatedStream:
        """The current stream: in a backward, the stream of the corresponding forward.

        Unless another was made current since this part of the backward began.
        """
        chosen, part = self._stack()[-1]
        if self.graph.is_idle():
            return chosen
        self.before()
        here = self.graph.follow(self._caller)
        if here is None or here == part:
            return chosen
        stream = self.graph.stream
        assert isinstance(stream, SimulatedStream), "it is one that forward used"
        return stream

    def _caller(self) -> SimulatedStream:
        return self._stack()[-1][0]

    @contextmanager
    def using(self, stream: SimulatedStream | None) -> Iterator[None]:
        """Inside the ``with`` block ``stream`` is current; None: whichever is."""
        before = self.current()
        stack = self._stack()
        stack.append((before if stream is None else stream, self.graph.part))
        self.graph.switched(stack[-1][0])
        try:
            yield
        finally:
            stack.pop()
            self.graph.switched(before)

    def host_waits(self, clock: Clock) -> None:
        """Make the host wait for all that a clock knows."""
        self.before()
        join(self.host.clock, clock)

    def begin(self, actor: Actor) -> int:
        """Numbers a piece of work that is queued on a stream, or that the host does at once."""
        join(actor.clock, self.host.clock)
        return actor.tick()


def _nothing() -> None:
    """The default observer, which does nothing."""
