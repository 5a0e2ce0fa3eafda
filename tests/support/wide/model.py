"""A small model, and how it is trained without sharding: what wide worlds are compared with.

Owns two references. *By ranks* computes the gradients of each rank's part of the batch by itself
and adds them in rank order, so that a sharded run may be compared bit for bit. *Whole* trains on
the whole batch at once, as a user would: the same numbers up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.sharding import fully_shard
from support import modules
from support.threads.ranks import seeded

WIDTH = 9
LEARNING_RATE = 0.1


class Block(modules.Residual):
    """A residual block whose sizes divide by nothing."""

    def __init__(self, width: int = WIDTH, hidden: int = 13) -> None:
        super().__init__(width, hidden, norm=True, bias=False)


class Stack(modules.Stack):
    """Blocks, and a head of the root's own."""

    def __init__(self, blocks: int, width: int = WIDTH, hidden: int = 13) -> None:
        made = [Block(width, hidden) for _ in range(blocks)]
        super().__init__(made, head=nn.Linear(width, 2))


def make_stack(blocks: int = 3) -> Stack:
    """The same model at every call, without touching torch's own random numbers."""
    model = Stack(blocks)
    generator = seeded(blocks)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 3)
    return model


def shard(model: Stack, **options: Any) -> Stack:
    """Give each block to ``fully_shard``, then the model, with the same options."""
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    return model


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def make_batch(world_size: int, step: int, per_rank: int = 2) -> torch.Tensor:
    """The whole batch of a step: ``[world_size * per_rank, width]``."""
    return torch.randn(world_size * per_rank, WIDTH, generator=seeded(world_size, step))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return (out - 1).square().mean()


def gradients_by_ranks(model: nn.Module, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The mean over ranks of each rank's gradients, added in rank order."""
    totals: list[torch.Tensor] = []
    for part in parts:
        replica = copy.deepcopy(model)
        replica.zero_grad()
        loss_of(replica, part).backward()
        grads = [param.grad for param in replica.parameters()]
        for index, grad in enumerate(grads):
            assert grad is not None
            if len(totals) < len(grads):
                totals.append(grad.clone())
            else:
                totals[index] += grad
    return [total * (1 / len(parts)) for total in totals]


def train_whole(model: nn.Module, batches: Sequence[torch.Tensor]) -> list[float]:
    """The losses of plain SGD steps, one on each batch; trains ``model`` in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
