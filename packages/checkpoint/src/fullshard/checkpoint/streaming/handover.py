"""Hands buckets from the thread that exchanges them to the one that consumes them.

Owns the only state that both share: one bucket ahead of the consumer, the end, an error, and
whether anybody still consumes. A thread that has ended consumes nothing, so no rank waits for it: a
process whose main thread raised can end.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["Full", "Handover"]

_LOOK = 0.2  # seconds between two looks whether the consuming thread is alive

Full = dict[str, torch.Tensor]
"""Whole parameters by name."""


class Handover:
    """Passes buckets from one thread to another, one at a time."""

    def __init__(self) -> None:
        """Start empty; the calling thread is the consumer until another asks for a bucket."""
        self._changed = threading.Condition()
        self._ready: list[Full] = []
        self._consumer = threading.current_thread()
        self._left = False
        self._ended = False
        self._error: BaseException | None = None

    # -- the thread that exchanges ----------------------------------------------------------------

    def wait_for_room(self) -> bool:
        """Return once the last bucket was taken; return whether a consumer is left."""
        with self._changed:
            while self._ready and not self._left and self._consumer.is_alive():
                self._changed.wait(_LOOK)
            return not self._left and self._consumer.is_alive()

    def put(self, full: Full) -> None:
        """Pass on a bucket; drop it if no consumer is left."""
        with self._changed:
            if not self._left:
                self._ready.append(full)
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Mark the end of the stream, with the error that ended it, if any."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    # -- the thread that consumes -----------------------------------------------------------------

    def take(self) -> Full | None:
        """Return the next bucket; None after the last one, and after ``leave()``.

        Raises:
            BaseException: the error that ended the stream.
        """
        with self._changed:
            self._consumer = threading.current_thread()
            self._changed.wait_for(lambda: self._ready or self._ended or self._left)
            if self._left:
                return None
            if self._ready:
                full = self._ready.pop(0)
                self._changed.notify_all()
                return full
            self.require_no_error()
            return None

    def leave(self) -> None:
        """Mark that no consumer is left."""
        with self._changed:
            self._left = True
            self._ready.clear()
            self._changed.notify_all()

    def require_no_error(self) -> None:
        """Raise the error that ended the stream, if one did."""
        if self._error is not None:
            raise self._error
