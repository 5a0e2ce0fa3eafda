"""Programs whose races are watched, and which use the collectives without a model."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm import (
    CommStreams,
    DefaultReduceScatter,
    RankMajorLayout,
    ReduceConfig,
    TensorSpec,
    foreach_reduce,
    reduction_scaling,
)
from fullshard.comm.collectives import lists
from fullshard.comm.runtime.streams import canonical_device


def gather_and_reduce_lists(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Lists of tensors that are changed before they travel, and after."""
    group = mesh.get_group("shard")
    specs = [TensorSpec(shape=(group.size() * 2, 3), dtype=torch.float32)]
    shards = [torch.ones(2, 3, device=mesh.device_type)]
    for _ in range(2):
        shards[0].mul_(2)
        full = lists.all_gather_tensors(shards, specs, group)
        shards = lists.reduce_scatter_tensors([full[0].mul(2)], specs, group)
    return shards


def reduce_in_flight(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Reductions that nobody waits for before the next ones are packed."""
    group, device = mesh.get_group("shard"), torch.device(mesh.device_type)
    specs = [TensorSpec(shape=(group.size() * 2, 3), dtype=torch.float32)]
    config = ReduceConfig(
        comm=DefaultReduceScatter(),
        process_group=group,
        streams=CommStreams(device),
        device=canonical_device(device),
        scaling=reduction_scaling(group.size(), torch.float32, averages=False),
    )
    layout, flights = RankMajorLayout(specs, group.size()), []
    for number in range(4):
        gradient = torch.full(specs[0].shape, float(number), device=device)
        flights.append(foreach_reduce([gradient], layout, config))
    return [flight.wait().shards[0] for flight in flights]
