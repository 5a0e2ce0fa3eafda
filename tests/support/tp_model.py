"""A small model with tensor parallel blocks, for tests of ``fully_shard`` on top of it.

Owns the model, its plan and its batches. A block has what tensor parallelism makes of parameters:
columns, rows, weights that are whole on each rank but see a part of the sequence (their gradients
are partial sums), and weights that it leaves alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from support.modules import Residual, Stack

WIDTH, LENGTH, ROWS = 6, 4, 8


class Net(Stack):
    """Two blocks and a head, which is not parallel."""

    def __init__(self, hidden: int) -> None:
        blocks = [Residual(WIDTH, hidden, norm=True) for _ in range(2)]
        super().__init__(blocks, head=nn.Linear(WIDTH, 3))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x.full_tensor() if isinstance(x, DTensor) else x)


def build(hidden: int = 8, *, dtype: torch.dtype = torch.float64) -> Any:
    """The plain model, with the same values on every rank."""
    torch.manual_seed(0)
    return Net(hidden).to(dtype)


def parallelize(model: Any, mesh: DeviceMesh) -> Any:
    """``model`` with its blocks parallel over ``mesh``, the sequence sharded between them."""
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    to_parts = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
    )
    parallelize_module(model.blocks[0], mesh, to_parts)
    return model


def shard(model: Any, fully_shard: Any, **arguments: Any) -> Any:
    """``model``, each block a group of its own and the rest the root's."""
    for block in model.blocks:
        fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    return model


def batch(step: int, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The whole batch of a step: the same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=dtype)


def rows_of(whole: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    return whole.chunk(world_size)[rank]


def train(model: Net, batches: list[torch.Tensor], *, rate: float = 0.1) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=rate)
    for inputs in batches:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
