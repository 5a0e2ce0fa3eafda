"""Worlds of up to 128 ranks without processes: each rank is a thread of this one.

Owns: starting the threads, a group for each set of them that asks for one, and the report of those
that failed. A rank that raises, or that ends while others wait for it, ends the wait of all. What
ranks share here and processes do not (random numbers, the list of observers) is theirs to mind; see
``threads_world`` for what ``fully_shard`` needs besides.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from support.threads.group import Meeting, RankLeftError, ThreadGroup

JOIN_TIMEOUT = 120.0  # seconds for all ranks together
SHOWN = 3  # tracebacks in a report

P = ParamSpec("P")
T = TypeVar("T")


class ThreadsFailed(AssertionError):
    """Some ranks did not return. ``errors`` maps those that raised by themselves to their error."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class ThreadWorld:
    """The ranks of one run, and the meetings of every group among them."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._lock = threading.Lock()
        self._meetings: dict[tuple[str, tuple[int, ...]], Meeting] = {}
        self._left: set[int] = set()
        self._failure: BaseException | None = None

    def group(self, ranks: tuple[int, ...], rank: int, name: str = "threads") -> ThreadGroup:
        """The end, for world rank ``rank``, of the group of ``ranks`` that has this name."""
        with self._lock:
            meeting = self._meetings.get((name, ranks))
            if meeting is None:
                meeting = self._meetings[name, ranks] = Meeting(len(ranks))
                for gone in self._left.intersection(ranks):
                    meeting.leave(ranks.index(gone))
                if self._failure is not None:
                    meeting.abort(self._failure)
        return ThreadGroup(meeting, ranks.index(rank), name)

    def leave(self, rank: int) -> None:
        with self._lock:
            self._left.add(rank)
            for (_, ranks), meeting in self._meetings.items():
                if rank in ranks:
                    meeting.leave(ranks.index(rank))

    def abort(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = failure
            for meeting in self._meetings.values():
                meeting.abort(failure)


class ThreadRank:
    """What a rank's function is called with: who it is, and the groups it belongs to.

    Attributes:
        rank: its number.
        world: all ranks.
        group: the process group of all ranks.
    """

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.rank = rank
        self.world = world
        self.group = world.group(tuple(range(world.world_size)), rank)

    @property
    def world_size(self) -> int:
        return self.world.world_size

    def neighbours(self, size: int) -> tuple[int, ...]:
        """The block of ``size`` consecutive ranks that this one is in."""
        first = self.rank // size * size
        return tuple(range(first, min(first + size, self.world_size)))

    def subgroup(self, size: int) -> ThreadGroup:
        """The process group of its block of ``size`` consecutive ranks."""
        return self.world.group(self.neighbours(size), self.rank)

    def generator(self, *more: int) -> torch.Generator:
        """Random numbers of this rank alone: torch's own generator is shared by all threads."""
        return seeded(self.rank, *more)


def seeded(*parts: int) -> torch.Generator:
    """A generator whose numbers follow from ``parts`` alone, on any thread."""
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) % 2**31
    return torch.Generator().manual_seed(seed)


def run_on_threads(
    fn: Callable[Concatenate[ThreadRank, P], T], world_size: int, *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """What ``fn(rank, *args, **kwargs)`` returned for each rank, in rank order.

    Raises:
        ThreadsFailed: with the tracebacks, if a rank raised or is not done in ``JOIN_TIMEOUT``.
    """
    __tracebackhide__ = True
    world = ThreadWorld(world_size)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # OpenMP's count is each thread's own; LAPACK goes by it
        try:
            results[rank] = fn(ThreadRank(world, rank), *args, **kwargs)
        except BaseException as error:
            errors[rank] = error
            world.abort(RankLeftError(f"rank {rank} raised {type(error).__name__}"))
        finally:
            world.leave(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(world_size)
    ]
    with _one_thread_each():
        try:
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + JOIN_TIMEOUT
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        except BaseException:
            world.abort(RankLeftError("the run was interrupted"))
            raise
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck or errors:
        world.abort(RankLeftError("the run is over"))
        raise _failure(world_size, errors, {rank: threads[rank] for rank in stuck})
    return [results[rank] for rank in range(world_size)]


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Without it each of the ranks would start a pool of threads of its own for large tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _failure(
    world_size: int, errors: dict[int, BaseException], stuck: dict[int, threading.Thread]
) -> ThreadsFailed:
    own = {rank: error for rank, error in errors.items() if not isinstance(error, RankLeftError)}
    own = own or errors
    lines = [f"{len(own) + len(stuck)} of {world_size} ranks failed: {sorted([*own, *stuck])}"]
    for rank in sorted(own)[:SHOWN]:
        lines += ["", f"---- rank {rank} ----", "".join(traceback.format_exception(own[rank]))]
    frames: dict[int, Any] = dict(sys._current_frames())
    for rank in sorted(stuck)[:SHOWN]:
        frame = frames.get(stuck[rank].ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(it ended)"
        lines += ["", f"---- rank {rank} is not done after {JOIN_TIMEOUT:g} s ----", stack]
    return ThreadsFailed("\n".join(lines), own)
