"""The parameter generation: which version of the parameters a kept copy was made from.

Owns one counter per process. It moves on when an optimizer steps, and within a step before each
call of its closure; when a state dict is loaded, when full parameters are written back, and when
the user says so with ``parameters_changed()``. Tensor version counters cannot serve: foreach and
fused optimizers do not move them on every build.

Also tells those who keep copies of frozen parameters that an optimizer stepped: it changes no
parameter that neither requires nor has a gradient, so such a copy outlives the step.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard.sharding.closures import Closure, StepArguments, has_closure, wrap_closure

__all__ = [
    "StepWatcher",
    "advance_generation",
    "current_generation",
    "last_announced",
    "optimizer_stepped",
    "tell_of_steps",
    "watch_optimizers",
]


class StepWatcher(Protocol):
    """Who wants to look at parameters right after each optimizer step."""

    def stepped(self) -> None:
        """Is called when parameters and gradients are as an optimizer's step left them."""
        ...


class _Generation:
    """The counter, and whether optimizers are being watched."""

    def __init__(self) -> None:
        self.number = 0
        self.announced = 0
        self.watching = False
        self.watchers: weakref.WeakSet[StepWatcher] = weakref.WeakSet()


_generation = _Generation()


def current_generation() -> int:
    """Returns the number of the present generation."""
    return _generation.number


def last_announced() -> int:
    """Returns the number of the last generation that began otherwise than by an optimizer's step.

    Any parameter may have changed then.
    """
    return _generation.announced


def advance_generation() -> None:
    """Declares every unsharded copy made so far stale."""
    _generation.number += 1
    _generation.announced = _generation.number


def optimizer_stepped() -> None:
    """Declares stale what an optimizer's step, just now, may have changed."""
    _generation.number += 1
    for watcher in tuple(_generation.watchers):
        watcher.stepped()


def tell_of_steps(watcher: StepWatcher) -> None:
    """Calls ``watcher.stepped()`` after each optimizer step, as long as the watcher lives."""
    _generation.watchers.add(watcher)


def watch_optimizers() -> None:
    """Makes the step of any optimizer in this process advance the generation, from now on.

    A step first waits for gathers that still read what it is about to change.
    """
    if not _generation.watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_on_step)
        _generation.watching = True


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer_stepped()


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepArguments | None:
    """Makes a closure see what the step that calls it has done so far."""
    return wrap_closure(args, kwargs, _after_changes) if has_closure(args, kwargs) else None


def _after_changes(closure: Closure) -> Closure:
    """Returns ``closure``, before which kept copies are stale."""

    def run() -> Any:
        optimizer_stepped()
        return closure()

    return run
