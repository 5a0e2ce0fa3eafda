"""A small program, and a fault as what differs from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fullshard.preflight import Phase
from fullshard.sharding import fully_shard
from support.modules import in_turn

__all__ = ["HIDDEN", "WIDTH", "Fault", "batch", "build", "hybrid", "is_sharded", "loss", "shard"]

WIDTH, HIDDEN = 6, 9


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault; what is not given is as it should be.

    Attributes:
        name: what was planted.
        phase: where it must be seen first.
        at: what the first difference must name: a parameter, or a module.
        causes: the names of causes that must be given, and no others; none: no cause can be named.
        program: what differs from a program without faults.
        ranks: how many it needs.
        unseen: why nothing of it is seen layer by layer; empty if it is.
        by_layer: where it must be seen first layer by layer; None: in the same phase.
        fits: whether the causes only fit, and are not shown.
    """

    name: str
    phase: Phase
    at: str = ""
    causes: tuple[str, ...] = ()
    program: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    unseen: str = ""
    by_layer: Phase | None = None
    fits: bool = False

    def __str__(self) -> str:
        return self.name


def build(between: Callable[[], nn.Module] = nn.Tanh, width: int = WIDTH, hidden: int = 9) -> Any:
    """Two layers and what a fault puts between them."""
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
    """This rank's inputs and targets."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    inputs, targets = torch.randn(2, 4, WIDTH, generator=generator).unbind()
    return inputs, targets


def loss(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean of squares."""
    inputs, targets = given
    return (model(inputs) - targets).square().mean()


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is sharded; a fault of the sharded run alone asks it."""
    return any(isinstance(param, DTensor) for param in model.parameters())
