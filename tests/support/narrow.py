"""A small model, its batches and its training, for tests of what travels narrow."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding import fully_shard
from support.surface import model as surface_model

WIDTH = 33


class Net(nn.Module):
    """Three blocks of a matrix and a norm, and a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return x * self.scale


def sharded(shard: Any = fully_shard, **options: Any) -> Any:
    net: Any = Net()
    for block in net.blocks:
        shard(block, **options)
    return shard(net, **options)


def batch(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 * seed + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def train(net: Any, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    losses = surface_model.train(net, optimizer, range(steps), batch)
    return losses, {name: full(param) for name, param in net.named_parameters()}


def full(param: Any) -> torch.Tensor:
    """Return the whole tensor on the CPU."""
    return (param.full_tensor() if hasattr(param, "full_tensor") else param.detach()).cpu()


def assert_replicas_equal(net: nn.Module, mesh: DeviceMesh) -> None:
    """Two replicas have the same shards to the last bit."""
    params: list[Any] = list(net.parameters())
    for param in params:
        local = param.to_local().contiguous()
        parts = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(parts, local, group=mesh.get_group("replicate"))
        assert torch.equal(*parts)
