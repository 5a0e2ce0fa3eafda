"""One small model for tests of what a user sees, and ordinary training to compare it with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fullshard.sharding import fully_shard
from support.modules import Stack

WIDTH = 6


class Block(nn.Module):
    """A residual block: 7 rows are uneven over 2 and 4 ranks, its scale is on one rank only."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width + 1)
        self.fc2 = nn.Linear(width + 1, width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.fc2(torch.tanh(self.fc1(x)))


class Net(Stack):
    """Blocks between a stem and a head, and one buffer."""

    steps: torch.Tensor

    def __init__(self, width: int = WIDTH, blocks: int = 2) -> None:
        stem = nn.Linear(width, width)
        made = [Block(width) for _ in range(blocks)]
        super().__init__(made, stem=stem, head=nn.Linear(width, 3))
        self.register_buffer("steps", torch.zeros(()))


def build(seed: int = 0, *, blocks: int = 2) -> Net:
    """The unsharded model, with the same values on every rank."""
    torch.manual_seed(seed)
    return Net(blocks=blocks)


def sharded(net: Net, **arguments: Any) -> Net:
    """``net``, each block a group of its own and the rest the root's."""
    for block in net.blocks:
        fully_shard(block, **arguments)
    fully_shard(net, **arguments)
    return net


def batch(step: int = 0, *, rows: int = 4) -> torch.Tensor:
    """The same rows of input on every rank, so that the mean over ranks is the local gradient."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 + step))


def train(
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    inputs: Callable[[int], torch.Tensor] = batch,
) -> list[float]:
    """The loss of each step of ordinary training."""
    losses = []
    for step in steps:
        loss = model(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
