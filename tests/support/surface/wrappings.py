"""Ways to shard the small model, and small models with what wrappers and ties do to names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from fullshard.policies import CPUOffloadPolicy
from fullshard.sharding import fully_shard, replicate
from support.modules import Assembled
from support.ranks import cpu_mesh
from support.surface.model import sharded


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def two_groups(net: Any) -> list[dict[str, Any]]:
    """Vectors without weight decay, then the rest with a rate of its own."""
    vectors = [param for param in net.parameters() if param.ndim == 1]
    matrices = [param for param in net.parameters() if param.ndim > 1]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 0.02}]


def hybrid(net: Any) -> Any:
    """Shards over pairs of ranks, replicas between pairs."""
    mesh = cpu_mesh((dist.get_world_size() // 2, 2), ("replicas", "shards"))
    return sharded(net, mesh=mesh)


def every_layer(net: Any) -> Any:
    for module in list(net.modules()):
        if isinstance(module, nn.Linear):
            fully_shard(module)
    return fully_shard(net)


def _columns(net: Any) -> Any:
    return sharded(net, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)


def _replicated(net: Any) -> Any:
    for block in net.blocks:
        replicate(block)
    return replicate(net)


WRAPPINGS: dict[str, Callable[[Any], Any]] = {
    "blocks": sharded,
    "the root alone": fully_shard,
    "every layer": every_layer,
    "columns": _columns,
    "replicas": _replicated,
    "offloaded": lambda net: sharded(net, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "unwrapped": lambda net: net,
}


def tied() -> Any:
    """Two layers with one weight, and a parameter without a dim."""
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    two.weight = one.weight
    factor = nn.Parameter(torch.tensor(1.5))
    return Assembled(
        lambda m, x: m.two(torch.tanh(m.one(x))) * m.factor, one=one, two=two, factor=factor
    )


class Wrapped(nn.Module):
    """What a wrapper class puts into names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args: Any) -> Any:
        return self._fsdp_wrapped_module(*args)
