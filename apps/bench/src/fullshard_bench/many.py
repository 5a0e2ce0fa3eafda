"""Many small parameters: groups of nine, in which the host's work is most of a step.

Owns the mathematics. The model has no buffers, so it can be built on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard_bench.workload import Shape, Workload

__all__ = ["Many", "ManyShape", "many"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyShape:
    """How many groups, and how wide their matrices are."""

    groups: int = 40
    width: int = 32


class Nine(nn.Module):
    """A residual block of nine parameters: a norm, three matrices, and what they add and scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.middle = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, width]` to the same shape."""
        hidden = torch.tanh(self.middle(torch.tanh(self.up(self.norm(x)))))
        output: torch.Tensor = x + self.scale * self.down(hidden)
        return output


class Many(nn.Module):
    """A stack of `Nine`, and a head of the root's own."""

    def __init__(self, shape: ManyShape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Nine(shape.width) for _ in range(shape.groups))
        self.head = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, width]` to the same shape."""
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def _loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    outputs: torch.Tensor = model(inputs)
    return (outputs.float() - targets).square().mean()


def many(name: str, sizes: ManyShape, shape: Shape) -> Workload:
    """The workload of groups of nine parameters."""
    rows = shape.rows * shape.tokens

    def batch(generator: torch.Generator) -> list[torch.Tensor]:
        return [torch.randn(rows, sizes.width, generator=generator) for _ in range(2)]

    return Workload(
        name=name,
        build=lambda: Many(sizes),
        units=lambda model: list(model.blocks),
        batch=batch,
        loss=_loss,
        items=rows,
        item="rows",
        on_meta=True,
    )
