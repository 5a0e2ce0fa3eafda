"""Checks of an optimizer's options: each error names the given value and the allowed values."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from fullshard.optim.base.stepped import label_of

__all__ = [
    "require_betas",
    "require_count",
    "require_not_negative",
    "require_one_of",
    "require_real",
]


def require_not_negative(group: Mapping[str, Any], *names: str) -> None:
    """Raise ``ValueError`` unless each option is a number of at least 0."""
    for name in names:
        value = group[name]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int | float) or not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {group[name]!r}; pass a finite number of at least 0")


def require_count(group: Mapping[str, Any], name: str, most: int) -> None:
    """Raise ``ValueError`` unless the option is a whole number from 1 to ``most``."""
    value = group[name]
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name} is {value!r}; pass a whole number from 1 to {most}")


def require_one_of(group: Mapping[str, Any], name: str, allowed: Collection[object]) -> None:
    """Raise ``ValueError`` unless the option is one of ``allowed``."""
    if group[name] not in allowed:
        said = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} is {group[name]!r}; pass one of {said}")


def require_real(group: Mapping[str, Any], name: str) -> None:
    """Raise ``ValueError`` unless all parameters are real; ``name``: the optimizer's."""
    for param in group["params"]:
        if not param.is_floating_point():
            raise ValueError(
                f"{name} got {label_of(param)} of {param.dtype}, and takes parameters of real "
                "numbers; step it with another optimizer"
            )


def require_betas(group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless both betas are at least 0 and below 1."""
    betas = group["betas"]
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas!r}; pass two numbers of at least 0 and below 1")
