"""Handles on what a method of a sharded module started and did not wait for."""

from __future__ import annotations

from collections.abc import Callable

from fullshard.sharding.base.compat import untraced

__all__ = ["GradientReductionHandle", "UnshardHandle"]


@untraced
class _Handle:
    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        """Take what waits; without it, there is nothing to wait for."""
        self._wait = wait

    def wait(self) -> None:
        """Return once what was started is over; further calls do nothing."""
        if self._wait is not None:
            self._wait()
            self._wait = None


class UnshardHandle(_Handle):
    """What ``unshard(async_op=True)`` returns: wait on it before using the full parameters.

    A forward of the module waits by itself.
    """


class GradientReductionHandle(_Handle):
    """The reductions that ``finalize_backward(async_op=True)`` launched.

    Wait on it before the gradients are used and before the next forward: that sets the gradients.
    """
