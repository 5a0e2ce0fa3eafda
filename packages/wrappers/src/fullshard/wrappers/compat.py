"""Private names of torch: the one file of this package that may use them.

Each function names the private name and the reason; each was seen on torch 2.11, 2.13 and 2.15
unless the function names versions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["checkpoint_helpers", "defers_gradients", "function_of_policy"]


def checkpoint_helpers(wrapper: type, strategies: Any) -> list[tuple[str, str, object]]:
    """Return what torch's state dict helpers need to take ``wrapper`` for FSDP1's class.

    An entry holds the module, the name, and the replacement. The helpers refuse a wrapped module
    without torch's own state, and search a strategy among torch's own hybrid strategies
    (``_get_module_fsdp_state_if_fully_sharded_module``; ``HYBRID_SHARDING_STRATEGIES``: 2.13,
    2.15).

    Args:
        wrapper: our class.
        strategies: our enum.
    """
    place = "torch.distributed.checkpoint.state_dict"
    asks, hybrid = "_get_module_fsdp_state_if_fully_sharded_module", "HYBRID_SHARDING_STRATEGIES"
    theirs = vars(sys.modules[place])[asks]

    def state_of(module: Any) -> Any:
        return module if isinstance(module, wrapper) else theirs(module)

    return [
        (place, asks, state_of),
        (place, hybrid, {each for each in strategies if each.is_hybrid}),
    ]


def defers_gradients() -> bool:
    """Return whether the schedule that calls the caller was given ``finalize_gradients=False``.

    With it, schedules do not call stages of torch's own sharded modules, but call all other stages
    (``_finalize_gradients``: 2.15). The schedule is ``self`` in the frame that called the stage.
    """
    schedule = sys._getframe(2).f_locals.get("self")
    return not getattr(schedule, "_finalize_gradients", True)


def function_of_policy(policy: Any) -> Callable[..., Any]:
    """Return the function that torch's own ``CustomPolicy`` was built with.

    The function has no public name, and such a policy cannot be called (``_lambda_fn``).
    """
    function: Callable[..., Any] = policy._lambda_fn
    return function
