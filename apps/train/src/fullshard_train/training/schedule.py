"""The learning rate of a step: a pure function, so that resuming needs no scheduler state."""

from __future__ import annotations

import math

from fullshard_train.settings.sections import OptimConfig

__all__ = ["learning_rate"]


def learning_rate(config: OptimConfig, *, step: int, steps: int) -> float:
    """The rate of update `step` (from 0) of `steps`.

    The rate rises linearly over `warmup_steps` updates up to `learning_rate`, then falls as a half
    cosine to `learning_rate * final_fraction` at the last update.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    remaining = max(steps - config.warmup_steps, 1)
    progress = min((step + 1 - config.warmup_steps) / remaining, 1.0)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)
