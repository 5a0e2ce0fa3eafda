"""Events of collectives and sharding, and the observers that receive them.

Owns: the kinds of event, the process-wide list of observers, and two observers that are always
useful. An observer only reads events: if it raises, it is reported once and removed. ``CHECKS`` see
each collective before its launch, and may raise instead. Without observers, ``emit`` does nothing
and does not read the clock.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from fullshard.comm.runtime.process_exit import finish_threads_at_exit
from fullshard.comm.runtime.required import require

__all__ = [
    "CHECKS",
    "LISTENERS",
    "TIMELINES",
    "WATCHERS",
    "CollectiveMismatchError",
    "Event",
    "EventKind",
    "EventLog",
    "Launch",
    "Mark",
    "Observer",
    "Timeline",
    "check_collective",
    "emit",
    "mark",
    "marked_wait",
    "marked_work",
    "observe",
]


class EventKind(StrEnum):
    """A kind of event as the host sees it: when work is queued, not when the device is done."""

    UNSHARD = "unshard"
    """A group's gather was issued."""
    WAIT = "wait"
    """A group's unshard finished: its parameters are usable."""
    RESHARD = "reshard"
    """A group went back to its shards."""
    REDUCE = "reduce"
    """A group's reduction was issued."""
    REDUCE_DONE = "reduce_done"
    """A group's reduced gradients are usable."""
    ALL_REDUCE = "all_reduce"
    """A reduction over replicas was issued."""
    PRE_FORWARD = "pre_forward"
    """A module's forward is about to run."""
    POST_FORWARD = "post_forward"
    """A module's forward has run."""
    PRE_BACKWARD = "pre_backward"
    """A group's backward is about to run."""
    POST_BACKWARD = "post_backward"
    """A group's backward has run."""
    PREFETCH = "prefetch"
    """A gather was issued ahead of its use."""
    ALL_GATHER = "all_gather"
    """An all-gather collective was called; bytes of its output."""
    REDUCE_SCATTER = "reduce_scatter"
    """A reduce-scatter collective was called; bytes of its input."""
    ALL_TO_ALL = "all_to_all"
    """An all-to-all of matrices for an optimizer was called; bytes that this rank sends."""
    COPY_IN = "copy_in"
    """Tensors were packed into a collective's input; bytes of that input."""
    COPY_OUT = "copy_out"
    """Full tensors were unpacked from a collective's output; bytes of those tensors."""
    ABANDONED = "abandoned"
    """A root's forward raised, or its backward did and is reset; ``sys.exception()`` is the error.
    """
    RESET = "reset"
    """A root is about to be brought back to its shards, after an error or at a user's wish."""


class Mark(StrEnum):
    """A moment that only timelines are told of."""

    BACKWARD_ENDED = "backward_ended"
    """A root's backward has run, and its gradients are in place."""
    WAIT = "wait_begins"
    """This rank begins to wait for other ranks."""
    WAIT_GATHER = "gather"
    """This rank begins to wait for a gather."""
    WAIT_REDUCTION = "reduction"
    """This rank begins to wait for a reduction."""
    WAIT_ENDED = "wait_ended"
    """What it waited for is there."""
    WORK = "work_begins"
    """In a wait, this rank begins to work on what is there."""
    WORK_ENDED = "work_ended"
    """It has worked on it."""
    STEP = "step"
    """An optimizer's step begins."""
    STEP_ENDED = "step_ended"
    """An optimizer's step is over."""
    FILES = "files"
    """This rank begins to read or write files."""
    FILES_ENDED = "files_ended"
    """It has read or written them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened on this rank.

    Attributes:
        kind: what happened.
        name: the full name of a group or module.
        rank: this rank, among those that share the group.
        nbytes: bytes that the event carried.
        time_ns: ``time.perf_counter_ns()`` when it happened.
        stream: the name of the stream, if it belongs to one.
    """

    kind: EventKind
    name: str = ""
    rank: int = 0
    nbytes: int = 0
    time_ns: int = 0
    stream: str = ""


class Observer(Protocol):
    """A receiver of events. Called on the thread where it happens, so be quick."""

    def on_event(self, event: Event) -> None:
        """Take note of ``event``."""


class Timeline(Protocol):
    """A receiver of time stamps: of events and marks, as they happen.

    Attributes:
        thread: the thread that steps optimizers; marked blocks of other threads do not count.
    """

    thread: int

    def note(self, kind: EventKind | Mark, name: str) -> None:
        """Keep the time at which ``kind`` happened to ``name``. It must not raise."""


class CollectiveMismatchError(RuntimeError):
    """Ranks did not come to the same collective; raised on all of them instead of a hang."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A collective that a rank is about to launch, as its ranks compare it.

    Attributes:
        kind: the kind of its event.
        name: whose tensors it moves.
        nbytes: bytes of the whole buffer.
        detail: what else must be equal on all ranks, in words.
    """

    kind: str
    name: str
    nbytes: int
    detail: str = ""


_Gradients: TypeAlias = Sequence[torch.Tensor | None]

CHECKS: list[Callable[[Launch, dist.ProcessGroup, _Gradients], None]] = []
"""Called before each collective, with its ranks and the gradients that it reduces, if any.

A check may raise to prevent the launch. The list is empty as a rule. While it is not, groups share
no launches, and freed shared memory reads as NaN, so that an error names one group.
"""
LISTENERS: list[Observer] = []
"""Who listens now: to be looked at before ``emit`` is called, which then costs nothing."""
WATCHERS: list[object] = []
"""Observers and timelines: to be looked at before ``emit`` of a kind that timelines keep."""
TIMELINES: list[Timeline] = []
"""Who is told of marks: to be looked at before ``mark`` is called."""
_failures: dict[int, str] = {}  # what to warn of when its context ends, by identity
_lock = threading.Lock()
_logger = logging.getLogger("fullshard.comm")


def emit(
    kind: EventKind, name: str = "", *, rank: int = 0, nbytes: int = 0, stream: str = ""
) -> None:
    """Send an event to every observer; do nothing if there is no observer."""
    for timeline in TIMELINES:
        timeline.note(kind, name)
    if not LISTENERS:
        return
    now = time.perf_counter_ns()
    event = Event(kind=kind, name=name, rank=rank, nbytes=nbytes, time_ns=now, stream=stream)
    for observer in tuple(LISTENERS):  # other threads may add or remove one
        try:
            observer.on_event(event)
        except Exception as error:  # the collective continues after any error of an observer
            _drop(observer, event, error)


def check_collective(
    kind: EventKind,
    name: str,
    process_group: dist.ProcessGroup,
    *,
    nbytes: int,
    detail: str = "",
    gradients: _Gradients = (),
) -> None:
    """Let ``CHECKS`` look at a collective before its launch; return at once if there are none.

    Call it right before a collective of your own, and debug mode compares that one, too.

    Args:
        kind: ``ALL_GATHER``, ``REDUCE_SCATTER``, ``ALL_REDUCE`` or ``ALL_TO_ALL``.
        name: whose tensors it moves.
        process_group: the ranks that take part.
        nbytes: bytes of the buffer.
        detail: what else must be equal on all ranks, in words.
        gradients: what it reduces, if that is a list of gradients.

    Raises:
        CollectiveMismatchError: on every rank alike, if debug mode is on and they did not come to
            the same call in time.
        ValueError: if debug mode is on and ``torch.distributed`` does not know the process group.
    """
    finish_threads_at_exit()
    for check in tuple(CHECKS):  # other threads may add or remove one
        launch = Launch(kind=kind.value, name=name, nbytes=nbytes, detail=detail)
        check(launch, process_group, gradients)


def mark(kind: Mark, name: str = "") -> None:
    """Tell timelines of a moment that is no event; on hot paths look at ``TIMELINES`` before."""
    for timeline in TIMELINES:
        timeline.note(kind, name)


@contextmanager
def marked_wait(kind: Mark, name: str) -> Iterator[None]:
    """A context in which this rank waits for other ranks; ``kind`` marks its beginning."""
    mark(kind, name)
    try:
        yield
    finally:
        mark(Mark.WAIT_ENDED)


@contextmanager
def marked_work() -> Iterator[None]:
    """A context in which this rank works, also if a wait surrounds it."""
    mark(Mark.WORK)
    try:
        yield
    finally:
        mark(Mark.WORK_ENDED)


def _drop(observer: Observer, event: Event, error: Exception) -> None:
    """Stop telling ``observer``; say so in the log now and as a warning when its context ends.

    Not as a warning now: filters may turn that into an exception in the middle of a collective.
    """
    _remove(observer)
    message = (
        f"observer {type(observer).__name__} raised {error!r} on {event.kind} of {event.name!r} "
        "and was told no more; mend its on_event"
    )
    _failures[id(observer)] = message
    _logger.error(message)


@contextmanager
def observe(observer: Observer) -> Iterator[Observer]:
    """A context in which ``observer`` receives every event of this process, on all threads.

    Raises:
        TypeError: if ``observer`` has no ``on_event`` method.
    """
    require(Observer, observer)
    with _lock:
        LISTENERS.append(observer)
        WATCHERS.append(observer)
    try:
        yield observer
    finally:
        _remove(observer)
        if message := _failures.pop(id(observer), ""):
            warnings.warn(message, RuntimeWarning, stacklevel=3)  # where the context was entered


def _remove(observer: Observer) -> None:
    """Forget one entry of ``observer``, of which there may be several: contexts nest."""
    with _lock:
        for told in (LISTENERS, WATCHERS):
            place = next((at for at, each in enumerate(told) if each is observer), None)
            if place is not None:
                del told[place]


@dataclass
class EventLog:
    """An observer that keeps every event, in order.

    Attributes:
        events: the events so far, the oldest first.
    """

    events: list[Event] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        """Append ``event``."""
        self.events.append(event)

    def kinds(self) -> list[EventKind]:
        """The kinds of all events, in order."""
        return [event.kind for event in self.events]

    def named(self, kind: EventKind) -> list[str]:
        """The names of the events of one kind, in order."""
        return [event.name for event in self.events if event.kind is kind]

    def of(self, *kinds: EventKind) -> list[Event]:
        """The events of the given kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    def clear(self) -> None:
        """Forget all events."""
        self.events.clear()
