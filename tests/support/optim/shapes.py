"""A module of parameters of many shapes, and its gradients, which are given, not computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from support.modules import Held

MATRICES = {
    "square": (8, 8),
    "wide": (6, 20),
    "tall": (20, 6),
    "few": (2, 9),
    "uneven": (7, 5),
    "experts": (5, 6, 4),
}
FUSED = {"fused": (18, 6)}
REST = {"bias": (7,), "embedding": (11, 4), "one": (1,), "kernel": (3, 2, 2, 2)}


class Shapes(Held):
    """One parameter of each shape."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(7)
        shapes = {**MATRICES, **FUSED, **REST}
        drawn = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        super().__init__({name: value.to(dtype) for name, value in drawn.items()})


def gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The whole gradients of a step, by names."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in {**MATRICES, **FUSED, **REST}.items()
    }


def groups_of(model: nn.Module, algorithm: str = "muon", **options: Any) -> list[dict[str, Any]]:
    """The groups that its shapes belong to; ``options``: of the matrices."""
    params = dict(model.named_parameters())
    return [
        {"params": [params[n] for n in MATRICES], "algorithm": algorithm, **options},
        {"params": [params[n] for n in FUSED], "algorithm": algorithm, "split": 3, **options},
        {"params": [params[n] for n in REST], "algorithm": "adamw", "lr": 0.01},
    ]
