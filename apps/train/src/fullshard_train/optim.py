"""The optimiser: AdamW with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fullshard_train.sections import OptimConfig

__all__ = ["build_optimizer"]


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over those of `parameters` that train, in two groups: with weight decay, and without.

    Decay pulls the rows of a matrix towards zero; a norm's weight or a bias (fewer than two dims)
    is left alone.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in trainable if parameter.ndim >= 2],
            "weight_decay": config.weight_decay,
        },
        {
            "params": [parameter for parameter in trainable if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    # fused: one kernel for all parameters; on the CPU the alternative is a Python loop over
    # DTensors.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )
