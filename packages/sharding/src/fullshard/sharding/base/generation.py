"""The parameter generation: which version of its parameters a group's kept copy was made from.

Owns one counter per group. It moves on when an optimizer that holds a parameter of the group's root
steps, and within a step before each call of its closure; when a state dict is loaded, when full
parameters are written back, and when the user says so with ``parameters_changed()``. Tensor version
counters cannot serve: foreach and fused optimizers do not move them on every build.

Also tells those who keep copies of frozen parameters that an optimizer stepped: it changes no
parameter that neither requires nor has a gradient, so such a copy outlives the step.
"""

from __future__ import annotations

import weakref
from typing import Protocol

__all__ = ["ParameterGeneration", "StepWatcher"]


class StepWatcher(Protocol):
    """Who wants to look at parameters right after each step of an optimizer that holds some."""

    def stepped(self) -> None:
        """Is called when parameters and gradients are as an optimizer's step left them."""
        ...


class ParameterGeneration:
    """The version of one group's parameters.

    Attributes:
        number: that of the present generation.
        announced: that of the last one that began otherwise than by an optimizer's step: any
            parameter of the group may have changed then.
    """

    def __init__(self) -> None:
        """Starts with the first."""
        self.number = 0
        self.announced = 0
        self._watchers: weakref.WeakSet[StepWatcher] = weakref.WeakSet()

    def advance(self) -> None:
        """Declares every copy made so far stale."""
        self.number += 1
        self.announced = self.number

    def stepped(self) -> None:
        """Declares stale what an optimizer's step, just now, may have changed."""
        self.number += 1
        for watcher in tuple(self._watchers):
            watcher.stepped()

    def tell_of_steps(self, watcher: StepWatcher) -> None:
        """Calls ``watcher.stepped()`` after each optimizer step, as long as the watcher lives."""
        self._watchers.add(watcher)
