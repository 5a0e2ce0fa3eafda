"""The parameter generation: which version of the parameters a kept copy was made from.

Owns one counter per process. It moves on when an optimizer steps, when a state dict is loaded, when
full parameters are written back, and when the user says so with ``parameters_changed()``. Tensor
version counters cannot serve: foreach and fused optimizers do not move them on every build.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard.sharding.reading import finish_reading

__all__ = ["advance_generation", "current_generation", "watch_optimizers"]


class _Generation:
    """The counter, and whether optimizers are being watched."""

    def __init__(self) -> None:
        self.number = 0
        self.watching = False


_generation = _Generation()


def current_generation() -> int:
    """Returns the number of the present generation."""
    return _generation.number


def advance_generation() -> None:
    """Declares every unsharded copy made so far stale."""
    _generation.number += 1


def watch_optimizers() -> None:
    """Makes the step of any optimizer in this process advance the generation, from now on.

    A step first waits for gathers that still read what it is about to change.
    """
    if not _generation.watching:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_on_step)
        _generation.watching = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    finish_reading()


def _on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    advance_generation()
