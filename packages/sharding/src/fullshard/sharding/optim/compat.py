"""Private names of torch (2.11 to 2.15) that the hooks of optimizers use, each with the reason."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch.optim.optimizer import Optimizer

__all__ = ["hooks_after_step", "hooks_before_step"]

hooks_before_step: Callable[[Optimizer], OrderedDict[int, Any]]
hooks_before_step = attrgetter("_optimizer_step_pre_hooks")
"""Return the hooks of one optimizer, by the number of the handle, in the order of their calls."""

hooks_after_step: Callable[[Optimizer], OrderedDict[int, Any]]
hooks_after_step = attrgetter("_optimizer_step_post_hooks")
"""Return the hooks after the step of one optimizer."""
