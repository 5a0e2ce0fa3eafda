"""The optimiser: AdamW, Muon, SOAP or 8-bit AdamW, with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fullshard.optim import SOAP, AdamW8bit, Muon
from fullshard_train.settings.sections import OptimConfig

__all__ = ["build_optimizer", "step_by"]

_RULE = "fullshard_train_rule"


def step_by(
    parameter: torch.Tensor, *, algorithm: str = "matrix", split: int | None = None
) -> None:
    """Describe a matrix for Muon or SOAP; a sharded parameter keeps it.

    Args:
        parameter: of two dims.
        algorithm: "adamw" for what is a table of rows rather than a matrix.
        split: the number of matrices that are stacked in the rows of this one.
    """
    setattr(parameter, _RULE, (algorithm, split))


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimConfig
) -> torch.optim.Optimizer:
    """The optimiser that `config` names, over those of `parameters` that train.

    Decay pulls the rows of a matrix towards zero; a norm's weight or a bias (fewer than two dims)
    is left alone. With Muon and SOAP, matrices of two dims are stepped whole; embeddings
    and the rest go to AdamW, at the same rate: updates have the size of AdamW's.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if config.optimizer in ("muon", "soap"):
        return _of_matrices(trainable, config)
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
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.epsilon,
    }
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw8bit":
        return AdamW8bit(groups, **options)
    # fused: one kernel for all parameters; on the CPU the alternative is a Python loop over
    # DTensors.
    return torch.optim.AdamW(groups, **options, fused=True)


def _of_matrices(trainable: list[nn.Parameter], config: OptimConfig) -> Muon | SOAP:
    by_rule: dict[tuple[str, int | None, bool], list[nn.Parameter]] = {}
    for parameter in trainable:
        algorithm, split = getattr(parameter, _RULE, ("matrix", None))
        is_matrix = parameter.ndim == 2 and algorithm == "matrix"
        algorithm = config.optimizer if is_matrix else "adamw"
        rule = (algorithm, split, parameter.ndim >= 2)
        by_rule.setdefault(rule, []).append(parameter)
    groups: list[dict[str, Any]] = []
    for (algorithm, split, decays), members in by_rule.items():
        group: dict[str, Any] = {"params": members, "algorithm": algorithm, "split": split}
        group["weight_decay"] = config.weight_decay if decays else 0.0
        if algorithm == "adamw":
            group["eps"] = config.epsilon
        groups.append(group)
    betas = (config.beta1, config.beta2)
    if config.optimizer == "soap":
        return SOAP(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon)
    return Muon(groups, lr=config.learning_rate, betas=betas, adjust_lr_fn="match_rms_adamw")
