"""Turns among measurements that run at once.

Owns the token that goes round: who holds it works, all others wait, and all use one core. A slow
    phase of a machine, or of one of its cores, therefore slows all of them, and they can be
    compared step by step. A round begins with another process, so that a process does not always
    find the caches of one other process. A measurement that ended early, or died, blocks no other
    one: a waiting process continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

__all__ = ["Alone", "RingTurn", "Turn", "ring", "share_core"]

_TOKEN = b"t"


class Turn(Protocol):
    """A context, to be entered again and again, in which this process may work."""

    def __enter__(self) -> None:
        """Waits until it may."""

    def __exit__(self, *error: object) -> None:
        """Lets others work."""

    def round(self, number: int) -> AbstractContextManager[None]:
        """A context for the turns of round `number`, which begins with another process each time.

        Processes must take equally many turns inside.
        """
        raise NotImplementedError


class Alone(nullcontext[None]):
    """The turn of one that shares the machine with no other: always."""

    def round(self, number: int) -> AbstractContextManager[None]:
        """Every round begins with it."""
        return nullcontext()


class RingTurn:
    """The turn of a process in a `ring`: while it holds the token."""

    def __init__(self, incoming: int, outgoing: int, place: int, count: int) -> None:
        """Takes the pipes from the process before and to the one after; which of `count` it is."""
        self._incoming = incoming
        self._outgoing = outgoing
        self._place = place
        self._count = count

    def __enter__(self) -> None:
        """Waits for the token."""
        os.read(self._incoming, len(_TOKEN))  # or for the end of the process before

    def __exit__(self, *error: object) -> None:
        """Hands it on."""
        with suppress(BrokenPipeError):
            os.write(self._outgoing, _TOKEN)

    @contextmanager
    def round(self, number: int) -> Iterator[None]:
        """A process passes the token once: those before the first at the start, others later."""
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
    """Keeps this process to one core, the same for all who call this; not on every system."""
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
