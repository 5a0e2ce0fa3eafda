"""Whose turn it is, among measurements that are made at once.

Owns the token that goes round: who holds it works, all others wait, and all use one core. So what
slows a machine, or one of its cores, for a while slows all of them, and they can be compared step
by step. A measurement that ended early, or died, holds nobody up: who waits for it goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

__all__ = ["Turn", "alone", "ring", "share_core"]

_TOKEN = b"t"


class Turn:
    """A context, to be entered again and again, in which this process holds the token."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        """Takes the pipes from the process before, and to the one after."""
        self._incoming = incoming
        self._outgoing = outgoing

    def __enter__(self) -> None:
        """Waits for the token."""
        os.read(self._incoming, len(_TOKEN))  # or for the end of the process before

    def __exit__(self, *error: object) -> None:
        """Hands it on."""
        with suppress(BrokenPipeError):
            os.write(self._outgoing, _TOKEN)


def alone() -> AbstractContextManager[None]:
    """The turn of one that shares the machine with no other: always."""
    return nullcontext()


def share_core() -> None:
    """Keeps this process to one core, the same for all who call this; not on every system."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


@contextmanager
def ring(count: int) -> Iterator[list[tuple[int, int]]]:
    """The ends of `count` pipes, for one `Turn` each; the first holds the token.

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
