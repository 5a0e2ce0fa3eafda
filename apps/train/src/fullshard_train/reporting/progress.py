"""The progress bar: one line on rank 0's terminal, nothing elsewhere."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tqdm import tqdm

__all__ = ["Progress"]

_FORMAT = "step {n_fmt}/{total_fmt} {bar} {percentage:3.0f}% {desc} [{elapsed}, {remaining} left]"


class Progress:
    """Shows step, loss, speed and time left.

    Args:
        total: updates in all.
        done: updates done before.
        item: what speed counts, in the plural.
        shown: whether to show anything.
    """

    def __init__(self, *, total: int, done: int, item: str, shown: bool) -> None:
        self.item = item
        # tqdm's own lock is a semaphore of the system, which a killed process would leave behind.
        tqdm.set_lock(threading.RLock())
        # A terminal is redrawn often; a log file, where each redraw is a new line, now and then.
        interval = 0.2 if sys.stderr.isatty() else 10.0
        self._bar: tqdm[Any] = tqdm(
            total=total,
            initial=done,
            disable=not shown,
            bar_format=_FORMAT,
            mininterval=interval,
            maxinterval=interval,
            dynamic_ncols=True,
        )

    def advance(self, steps: int, *, loss: float, speed: float) -> None:
        """Move by `steps` and show the last loss and the speed in items per second."""
        self._bar.set_description_str(f"loss {loss:.4f}, {speed:,.0f} {self.item}/s", refresh=False)
        self._bar.update(steps)

    def close(self) -> None:
        """End the line."""
        self._bar.close()
