"""Turns among measurements that run at once.

Owns the token that the processes pass round a ring. The process with the token works on the core
that all share, so a slow phase of the machine slows all measurements alike. The first process
changes from round to round, so that caches do not always favour one process. A measurement that
ended early, or died, does not block the waiting processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

__all__ = ["Alone", "RingTurn", "Turn", "ring", "share_core"]

_TOKEN = b"t"


class Turn(Protocol):
    """Context in which this process may work; it can be entered many times."""

    def __enter__(self) -> None:
        """Wait until this process may work."""

    def __exit__(self, *error: object) -> None:
        """Let other processes work."""

    def round(self, number: int) -> AbstractContextManager[None]:
        """Return a context for the turns of round `number`; each round begins with another process.

        Processes must take equally many turns inside.
        """
        raise NotImplementedError


class Alone(nullcontext[None]):
    """Turn of a process that shares the machine with no other process: always."""

    def round(self, number: int) -> AbstractContextManager[None]:
        """Return an empty context: every round begins with this process."""
        return nullcontext()


class RingTurn:
    """Turn of a process in a `ring`, as long as the process holds the token."""

    def __init__(self, incoming: int, outgoing: int, place: int, count: int) -> None:
        """Take the pipes from the process before and to the one after; which of `count` it is."""
        self._incoming = incoming
        self._outgoing = outgoing
        self._place = place
        self._count = count

    def __enter__(self) -> None:
        """Wait for the token."""
        os.read(self._incoming, len(_TOKEN))  # or for the end of the process before

    def __exit__(self, *error: object) -> None:
        """Pass the token to the next process."""
        with suppress(BrokenPipeError):
            os.write(self._outgoing, _TOKEN)

    @contextmanager
    def round(self, number: int) -> Iterator[None]:
        """Pass the token once: before the turns, or after them.

        Processes in front of the one that begins the round pass the token before their turns.
        """
        before_the_first = self._place < number % self._count
        if before_the_first:
            self._pass()
        yield
        if not before_the_first:
            self._pass()

    def _pass(self) -> None:
        with self:
            pass


def share_core() -> None:
    """Keep this process to one core, the same for all who call this; not on every system."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


@contextmanager
def ring(count: int) -> Iterator[list[tuple[int, int]]]:
    """The ends of `count` pipes, for one `RingTurn` each; the first holds the token.

    Processes are to be started inside, each with its own two; they are closed here afterwards.
    """
    pipes = [os.pipe() for _ in range(count)]
    try:
        os.write(pipes[0][1], _TOKEN)
        yield [(pipes[place][0], pipes[(place + 1) % count][1]) for place in range(count)]
    finally:
        for pipe in pipes:
            for end in pipe:
                os.close(end)
