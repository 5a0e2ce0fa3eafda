"""A ring of time stamps of this process: where its time went, without communication.

Owns ``Timeline``. ``fullshard.comm`` defines the events and marks that are stamped, and tells
timelines of them. ``own_times`` makes phases of time stamps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fullshard.comm import EventKind
from fullshard.comm.spi import TIMELINES, WATCHERS, Mark

__all__ = ["Taken", "Timeline"]


class Timeline:
    """The latest time stamps of this process, in a ring.

    A time stamp is one append to a ``deque``, which other threads cannot tear apart: 0.14 us. Two
    stores into preallocated arrays took 0.32 us, and could be interrupted halfway.

    Attributes:
        clock: the time in nanoseconds.
        note: a function that keeps a time stamp, for a kind and a name.
        thread: the thread that steps optimizers; blocks of other threads do not count.
        optimizer_steps: steps of optimizers that ended since it was made.

    Args:
        capacity: how many time stamps are kept, about 100 bytes each.
        clock: the time in nanoseconds.

    Raises:
        ValueError: if ``capacity`` is below 2.
    """

    def __init__(
        self, capacity: int = 1 << 15, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        if capacity < 2:
            raise ValueError(f"capacity is {capacity}; pass 2 or more")
        self.clock = clock
        self.thread = 0
        self.optimizer_steps = 0
        ring: deque[tuple[int, str, str]] = deque(maxlen=capacity)
        append = ring.append

        def note(kind: EventKind | Mark, name: str) -> None:
            append((clock(), kind, name))

        self._ring = ring
        self.note = note
        self._stepping: list[int] = []  # optimizers whose step has begun, by id
        self._handles: list[RemovableHandle] = []

    def start(self) -> None:
        """Keep time stamps from now on."""
        if self._handles:
            return
        self.thread = threading.get_ident()
        self._handles = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ended),
        ]
        TIMELINES.append(self)
        WATCHERS.append(self)

    def stop(self) -> None:
        """Keep no more; those that were kept stay."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        TIMELINES.remove(self)
        WATCHERS.remove(self)

    def _step_begins(self, optimizer: Any, *given: Any) -> None:
        """Keep the beginning of an outermost step.

        An optimizer that begins again has called its base class, or its last step raised.
        """
        stepping, own = self._stepping, id(optimizer)
        if own in stepping:
            del stepping[stepping.index(own) :]
        if not stepping:
            self.thread = threading.get_ident()
            self.note(Mark.STEP, "")
        stepping.append(own)

    def _step_ended(self, optimizer: Any, *given: Any) -> None:
        stepping, own = self._stepping, id(optimizer)
        if own in stepping:
            del stepping[stepping.index(own) :]
            if not stepping:
                self.optimizer_steps += 1
                self.note(Mark.STEP_ENDED, "")

    def take(self) -> Taken:
        """Return the time stamps since the last call, oldest first, and forget them."""
        ring = self._ring
        stamps = [ring.popleft() for _ in range(len(ring))]
        return Taken(stamps, len(stamps) < (ring.maxlen or 0), self.optimizer_steps)


class Taken(NamedTuple):
    """What ``Timeline.take`` returns.

    Attributes:
        stamps: nanoseconds, the value of an ``EventKind`` or a ``Mark``, and a name.
        whole: whether the ring had room for all.
        optimizer_steps: steps of optimizers that ended since the timeline was made.
    """

    stamps: list[tuple[int, str, str]]
    whole: bool
    optimizer_steps: int
