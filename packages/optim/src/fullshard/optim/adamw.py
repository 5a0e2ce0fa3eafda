"""AdamW on shards, for the parameters that are no matrices.

Owns its state and its call of torch's own AdamW, whose rule is elementwise: on shards it computes,
bit for bit, what it computes on the whole. (The fused kernel does not: on the CPU its last elements
are rounded otherwise, so which they are would depend on the cut.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from fullshard.optim.base.stepped import Stepped

__all__ = ["ADAMW_STATE", "start_adamw", "step_adamw"]


ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
"""The keys of a parameter's state."""


def start_adamw(each: Stepped) -> None:
    """Gives a parameter its first state, or checks what it has.

    Raises:
        RuntimeError: if that is cut otherwise than the parameter.
    """
    if not each.state:
        each.state["step"] = torch.zeros((), dtype=torch.float32)
        each.state["exp_avg"] = each.like()
        each.state["exp_avg_sq"] = each.like()
    each.part("exp_avg")
    each.part("exp_avg_sq")


def step_adamw(stepped: Sequence[Stepped]) -> None:
    """Steps parameters of one group by AdamW (Loshchilov and Hutter, 2019), as torch does.

    Each has a state, by ``start_adamw``; there is at least one.
    """
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
