"""AdamW on shards, for the parameters that are no matrices.

Owns its state and its call of torch's own AdamW, whose rule is elementwise: on shards it computes,
bit for bit, what it computes on the whole. (The fused kernel does not: on the CPU its last elements
are rounded otherwise, so which they are would depend on the cut.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from fullshard.optim.base.loading import Shapes
from fullshard.optim.base.stepped import Stepped

__all__ = ["adamw_shapes", "require_adamw", "step_adamw"]

_AVERAGES = ("exp_avg", "exp_avg_sq")


def adamw_shapes(param: torch.Tensor) -> Shapes:
    """Return the keys of a parameter's state, and the shape of each tensor; None: a number."""
    return {"step": None, **dict.fromkeys(_AVERAGES, tuple(param.shape))}


def require_adamw(each: Stepped) -> None:
    """Raise ``RuntimeError`` if a parameter has a state that is cut otherwise than it is."""
    if each.state:
        for name in _AVERAGES:
            each.part(name)


def step_adamw(stepped: Sequence[Stepped]) -> None:
    """Step parameters of one group by AdamW (Loshchilov and Hutter, 2019), as torch does.

    At least one; those that were never stepped get their first state.
    """
    for each in stepped:
        if not each.state:
            each.state["step"] = torch.zeros((), dtype=torch.float32)
            each.state.update({name: each.like() for name in _AVERAGES})
    options = stepped[0].options
    beta1, beta2 = options["betas"]
    adamw(
        [each.data for each in stepped],
        [each.gradient for each in stepped],
        [each.part("exp_avg") for each in stepped],
        [each.part("exp_avg_sq") for each in stepped],
        [],
        [each.state["step"] for each in stepped],
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(options["lr"]),
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=False,
    )
