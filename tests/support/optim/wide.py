"""A module like ``Shapes``, wide enough for states of 8 bits; its gradients are given."""

from __future__ import annotations

import torch

from support.modules import Held

SHAPES = {
    "square": (64, 256),
    "wide": (10, 900),
    "tall": (70, 64),
    "few": (2, 300),  # under 4096 elements
    "uneven": (13, 517),
    "experts": (5, 6, 300),
    "fused": (18, 256),
    "bias": (5000,),
    "embedding": (200, 40),  # rows under 64
    "one": (1,),
}


class Wide(Held):
    """One parameter of each shape."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(8)
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        super().__init__({name: value.to(dtype) for name, value in drawn.items()})


def wide_gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The whole gradients of a step, by names: of sizes that differ from block to block."""
    generator = torch.Generator().manual_seed(200 + step)
    return {
        name: (torch.randn(shape, generator=generator) ** 3).to(dtype)
        for name, shape in SHAPES.items()
    }
