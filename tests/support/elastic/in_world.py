"""Replica groups inside one world of ranks, with a coordinator that needs no torchft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.elastic import Coordinator, ElasticOptions, Quorum, ReplicaGroups

__all__ = ["InWorld", "replica_groups"]


@dataclass
class InWorld(Coordinator):
    """All groups of the world, always; a new quorum after each dropped step."""

    own: int
    names: tuple[str, ...]
    process_group: dist.ProcessGroup
    store: str
    number: int = 1
    closed: bool = field(default=False, init=False)

    def quorum(self, step: int, failures: int) -> Quorum:
        number = torch.tensor([self.number + (failures > 0)])
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        self.number = int(number)
        return Quorum(number=self.number, names=self.names, own=self.own, store=self.store)

    def agree(self, step: int, ok: bool) -> bool:
        votes = torch.tensor([int(ok)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.process_group)
        return bool(votes)

    def close(self) -> None:
        self.closed = True


@contextmanager
def replica_groups(
    sizes: Sequence[int], **options: Any
) -> Iterator[tuple[ReplicaGroups, DeviceMesh, int]]:
    """The replica group of this rank, its mesh and its number; groups have ``sizes`` ranks."""
    names = [chr(ord("a") + place) for place in range(len(sizes))]
    first = [sum(sizes[:place]) for place in range(len(sizes))]
    made = [dist.new_group(list(range(f, f + n))) for f, n in zip(first, sizes, strict=True)]
    own = next(p for p, f in enumerate(first) if f <= dist.get_rank() < f + sizes[p])
    process_group = made[own]
    assert isinstance(process_group, dist.ProcessGroup)
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        told[0] = f"127.0.0.1:{server.port}"
    dist.broadcast_object_list(told, src=0)
    coordinator = InWorld(own, tuple(names), process_group, told[0])
    groups = ReplicaGroups(
        ElasticOptions(
            lighthouse="http://127.0.0.1:1",
            group=names[own],
            host="127.0.0.1",
            **{"timeout": 20.0, **options},
        ),
        process_group=process_group,
        coordinator=coordinator,
    )
    name = f"elastic_{process_group.group_name}"
    mesh = DeviceMesh.from_group(process_group, "cpu", mesh_dim_names=(name,))
    try:
        yield groups, mesh, own
    finally:
        groups.close()
        dist.barrier()  # the store is rank 0's
        for each in made:
            if each is process_group:
                dist.destroy_process_group(each)
