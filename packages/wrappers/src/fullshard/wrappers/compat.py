"""torch's private names, and nothing else: the one file of this package that may use them.

Each function says why the private name is needed, and names it; each was seen on torch 2.11, 2.13
and 2.15 unless it says on which.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["checkpoint_helpers", "function_of_policy"]


def checkpoint_helpers(wrapper: type, strategies: Any) -> list[tuple[str, str, object]]:
    """Returns what torch's state dict helpers need to take ``wrapper`` for FSDP1's class.

    Each as module, name, and what to put there. They refuse a wrapped module that has none of
    torch's own state, and look a strategy up among torch's own hybrid ones
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


def function_of_policy(policy: Any) -> Callable[..., Any]:
    """Returns the function that torch's own ``CustomPolicy`` was built with.

    It has no public name, and a policy that was built so cannot be asked (``_lambda_fn``).
    """
    function: Callable[..., Any] = policy._lambda_fn
    return function
