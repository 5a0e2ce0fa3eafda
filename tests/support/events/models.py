"""Small models whose order of modules is known by heart, for the tests of order and leases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM = 8


class Block(nn.Module):
    """Two linears and a residual.

    Args:
        inner: how to recompute what is inside: None, or ``use_reentrant`` for a checkpoint.
    """

    def __init__(self, *, inner: bool | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.inner = inner

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner is None:
            return x + self.compute(x)
        return x + checkpoint(self.compute, x, use_reentrant=self.inner)


class Net(nn.Module):
    """Blocks and a head; the head's parameters belong to the root's group.

    Args:
        blocks: how many.
        outer: how to recompute each block: None, or ``use_reentrant`` for a checkpoint around it.
        inner: the same, inside each block.
    """

    def __init__(
        self, blocks: int = 3, *, outer: bool | None = None, inner: bool | None = None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner=inner) for _ in range(blocks))
        self.head = nn.Linear(DIM, DIM)
        self.outer = outer

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.outer is None:
            return block(x)
        return checkpoint(block, x, use_reentrant=self.outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)


def make_net(
    shard: Callable[..., Any] | None,
    *,
    nested: bool = False,
    blocks: int = 3,
    outer: bool | None = None,
    inner: bool | None = None,
    **arguments: Any,
) -> Any:
    """A ``Net``, its blocks and itself sharded by ``shard``; None leaves it whole.

    Args:
        shard: ``fully_shard``, ours or torch's.
        nested: shard ``up`` and ``down`` of each block by themselves; the block has then no
            parameters of its own.
        blocks: how many blocks.
        outer: see ``Net``.
        inner: see ``Net``.
        arguments: go to ``shard``.
    """
    torch.manual_seed(0)
    net = Net(blocks, outer=outer, inner=inner)
    if shard is None:
        return net
    for block in net.blocks:
        if nested:
            shard(block.up, **arguments)
            shard(block.down, **arguments)
        shard(block, **arguments)
    return shard(net, **arguments)


def make_inputs(rank: int, *, seed: int = 1, requires_grad: bool = False) -> torch.Tensor:
    """Rank's own batch, ``[4, DIM]``."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(4, DIM, generator=generator).requires_grad_(requires_grad)


def batch(*, seed: int = 1, requires_grad: bool = False) -> torch.Tensor:
    """This rank's batch, ``[4, DIM]``; reentrant checkpointing wants one that needs a gradient."""
    return make_inputs(dist.get_rank(), seed=seed, requires_grad=requires_grad)


def step(net: nn.Module, **kwargs: Any) -> None:
    """One forward and backward on this rank's batch."""
    net(batch(**kwargs)).square().sum().backward()


def leaf_batch(*, seed: int = 1) -> torch.Tensor:
    """This rank's batch, which needs a gradient."""
    return batch(seed=seed, requires_grad=True)
