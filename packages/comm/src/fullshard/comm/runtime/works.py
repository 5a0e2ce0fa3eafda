"""Work handles: one for several collectives that were launched together, and their waits.

Owns: waiting for all of them, even if one fails, since until then they read and write memory. The
first ``wait()`` then calls the function that processes the results. Refuses: launching.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

__all__ = ["SeveralWorks", "awaited"]


def _nothing() -> None:
    """Do nothing after the wait."""


class SeveralWorks(dist.Work):
    """The handle of several collectives, whose first ``wait()`` also does what follows them."""

    def __init__(self, works: Sequence[dist.Work], then: Callable[[], None] = _nothing) -> None:
        super().__init__()
        self._works = tuple(works)
        self._then = then

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not wait for another rank."""
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all, then do what follows; later calls do nothing, or fail as the first did.

        Raises:
            RuntimeError: the first error of any of them, once none is under way.
        """
        errors: list[RuntimeError] = []
        for work in self._works:
            try:
                work.wait(timeout)
            except RuntimeError as error:  # what a backend raises
                errors.append(error)
        if errors:
            raise errors[0]
        then, self._works, self._then = self._then, (), _nothing
        then()
        return True


def awaited(work: dist.Work, async_op: bool) -> dist.Work | None:
    """Return ``work`` if the collective is asynchronous; else wait, and return None."""
    if async_op:
        return work
    work.wait()
    return None
