"""Blocks in which a rank waits for others or uses files: marks for timelines.

Owns ``waiting`` and ``file_access``. ``observer`` defines the marks, and knows the timelines.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from fullshard.comm.runtime.observer import TIMELINES, Mark

__all__ = ["file_access", "waiting"]


@contextmanager
def _marked(begin: Mark, end: Mark, name: str) -> Iterator[None]:
    """Mark a block, unless another thread runs it than the one that steps optimizers.

    Checkpoints may be written by a thread of their own.
    """
    told = [each for each in TIMELINES if each.thread == threading.get_ident()]
    for timeline in told:
        timeline.note(begin, name)
    try:
        yield
    finally:
        for timeline in told:
            timeline.note(end, name)


def waiting(name: str = "ranks") -> AbstractContextManager[None]:
    """A context in which this rank waits for other ranks: not its own time.

    Put it around collectives of your own, such as the sum of a loss over ranks. The engine's are
    known. It does nothing, unless time stamps are kept.

    Args:
        name: what is waited for.
    """
    return _marked(Mark.WAIT, Mark.WAIT_ENDED, name)


def file_access(name: str = "files") -> AbstractContextManager[None]:
    """A context in which this rank reads or writes files; ``waiting`` may be used inside.

    ``fullshard.checkpoint`` has it around its saves and loads. It does nothing, unless time stamps
    are kept.

    Args:
        name: what is read or written.
    """
    return _marked(Mark.FILES, Mark.FILES_ENDED, name)
