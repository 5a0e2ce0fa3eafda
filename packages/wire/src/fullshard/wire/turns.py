"""Runs what follows collectives on a thread, one after the other, in the order of their launches.

Owns the thread and the handles. The thread starts the second phase of a two-phase collective when
the first phase has ended: no rank has to wait for the first phase before another rank of its host
can begin the second. The order in which ranks wait does not matter. Refuses: knowing what runs, and
devices with streams, which keep such an order themselves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist

__all__ = ["Turns"]


class _Turn(dist.Work):
    """A queued function and its handle."""

    def __init__(self, run: Callable[[], dist.Work | None]) -> None:
        super().__init__()
        self._run: Callable[[], dist.Work | None] | None = run
        self._over = threading.Event()
        self._left: dist.Work | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the function on the thread."""
        assert self._run is not None, "it runs once"
        try:
            with torch.no_grad():
                self._left = self._run()
        except BaseException as error:  # it belongs to who waits
            self._error = error
        self._run = None
        self._over.set()

    def is_completed(self) -> bool:
        """Return whether ``wait()`` would return without waiting for another rank."""
        return self._over.is_set() and (self._left is None or self._left.is_completed())

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return once it has run, and what it launched last is over; later calls at once.

        Args:
            timeout: how long to wait; 0: until the collective's own timeout.

        Raises:
            RuntimeError: if the time is over, and whatever it raised itself.
        """
        if not self._over.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"a collective by hosts is not over after {timeout}")
        if self._error is not None:
            raise self._error
        if self._left is not None:
            self._left.wait(timeout)
            self._left = None
        return True


class Turns:
    """A thread, from the first launch on, that ends with this object."""

    def __init__(self) -> None:
        """Initialise without a thread."""
        self._waiting: SimpleQueue[_Turn | None] | None = None

    def launch(self, run: Callable[[], dist.Work | None]) -> dist.Work:
        """Return the handle of ``run``, which runs once all that was launched before has.

        ``run`` may return the handle of something that it launched last: that is waited for on the
        thread of who waits, and keeps no other turn waiting.
        """
        if self._waiting is None:
            self._waiting = SimpleQueue()
            name = "fullshard hosts"
            # A daemon: who ends while a peer is lost does not wait for it.
            threading.Thread(target=_take, args=(self._waiting,), name=name, daemon=True).start()
            weakref.finalize(self, self._waiting.put, None)
        turn = _Turn(run)
        self._waiting.put(turn)
        return turn


def _take(waiting: SimpleQueue[_Turn | None]) -> None:
    while (turn := waiting.get()) is not None:
        turn.run()
        del turn  # its tensors go before the next one comes
