"""A small program, and a fault as what differs from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard.preflight import Phase
from fullshard.sharding import fully_shard
from support.modules import in_turn

WIDTH = 6


class Fault:
    """A program with one fault, and what must be seen of it.

    Args:
        name: what was planted.
        phase: where it must be seen first.
        at: what the first difference must name: a parameter, or a module.
        cause: the only cause that must be given; empty: no cause can be named.
        ranks: how many it needs.
        unseen: why nothing of it is seen layer by layer; empty if it is.
        by_layer: where it must be seen first layer by layer; None: in the same phase.
        fits: whether the cause only fits, and is not shown.
        program: what differs from a program without faults.
    """

    def __init__(
        self,
        name: str,
        phase: Phase,
        at: str = "",
        cause: str = "",
        *,
        ranks: int = 2,
        unseen: str = "",
        by_layer: Phase | None = None,
        fits: bool = False,
        **program: Any,
    ) -> None:
        self.name, self.phase, self.at = name, phase, at
        self.causes = (cause,) if cause else ()
        self.ranks, self.unseen, self.by_layer, self.fits = ranks, unseen, by_layer, fits
        self.program = program

    def __str__(self) -> str:
        return self.name


def build(between: Callable[[], nn.Module] = nn.Tanh, width: int = WIDTH, hidden: int = 9) -> Any:
    return in_turn(up=nn.Linear(width, hidden), between=between(), down=nn.Linear(hidden, width))


def shard(model: Any, **arguments: Any) -> Any:
    """Each layer, and the rest."""
    fully_shard(model.up, **arguments)
    fully_shard(model.down, **arguments)
    return fully_shard(model, **arguments)


def hybrid(model: Any) -> Any:
    """The same over two replicas of two shards."""
    return shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs, targets = torch.randn(2, 4, WIDTH, generator=generator).unbind()
    return inputs, targets


def loss(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = given
    return (model(inputs) - targets).square().mean()


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is sharded; a fault of the sharded run alone asks it."""
    return any(isinstance(param, DTensor) for param in model.parameters())
