"""Handles on what a method of a sharded module started and did not wait for."""

from __future__ import annotations

from fullshard.sharding.base.compat import untraced
from fullshard.sharding.hooks.context import RootContext
from fullshard.sharding.hooks.module_state import ModuleState

__all__ = ["GradientReductionHandle", "UnshardHandle"]


@untraced
class UnshardHandle:
    """What ``unshard(async_op=True)`` returns: wait on it before using the full parameters.

    A forward of the module waits by itself.
    """

    def __init__(self, state: ModuleState | None = None) -> None:
        """Wrap the module's state; without one, there is nothing to wait for."""
        self._state = state

    def wait(self) -> None:
        """Return once the module's full parameters may be used; any number of calls is fine."""
        if self._state is not None:
            self._state.wait_for_unshard()
            self._state = None


@untraced
class GradientReductionHandle:
    """The reductions that ``finalize_backward(async_op=True)`` launched."""

    def __init__(self, context: RootContext | None = None) -> None:
        """Wrap the root's state; without one, there is nothing to wait for."""
        self._context = context

    def wait(self) -> None:
        """Wait for the reductions and set the gradients; further calls do nothing.

        Call it before the gradients are used and before the next forward.
        """
        if self._context is not None:
            self._context.commit()
            self._context = None
