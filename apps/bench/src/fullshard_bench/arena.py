"""Where contestants meet: a device, a mesh, and one process group of all its ranks.

Owns making meshes: of real ranks, and of the same shape over a backend that moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard_bench.meshes import MeshShape
from fullshard_bench.silent import SILENT, register_silent_backend

__all__ = ["Arena", "real_arena", "silent_arena"]


@dataclass(frozen=True, kw_only=True)
class Arena:
    """The services for a contestant.

    Attributes:
        device: where this rank computes.
        mesh: 1-D (`shard`) or 2-D (`replicate`, `shard`).
        group: all ranks of the mesh.
        silent: whether nothing comes from other ranks, so that values mean nothing.
    """

    device: torch.device
    mesh: DeviceMesh
    group: dist.ProcessGroup
    silent: bool

    @property
    def rank(self) -> int:
        """This rank's number in `group`."""
        return int(self.group.rank())

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.group.size())


def real_arena(shape: MeshShape, device: torch.device) -> Arena | None:
    """The first ranks of the world as a mesh; None on the others. Call it on all ranks."""
    group = _whole_group(shape, None)
    table = torch.arange(shape.ranks).view(shape.sizes)
    mesh = DeviceMesh(device.type, table, mesh_dim_names=shape.names)
    if dist.get_rank() >= shape.ranks:
        return None
    return Arena(device=device, mesh=mesh, group=group, silent=False)


def silent_arena(shape: MeshShape, device: torch.device, backend: str = SILENT) -> Arena | None:
    """As `real_arena`, over a backend that moves nothing from rank to rank."""
    register_silent_backend()
    group = _whole_group(shape, backend)
    table = torch.arange(shape.ranks).view(shape.sizes)
    rank = dist.get_rank()
    if len(shape.sizes) == 1:
        axes = [group]
    else:
        columns = [_own(list(line), rank, backend) for line in table.t().tolist()]
        lines = [_own(list(line), rank, backend) for line in table.tolist()]
        axes = [each for each in (*columns, *lines) if each is not None]
    if rank >= shape.ranks:
        return None
    if len(axes) == 1:
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=shape.names)
    else:
        mesh = DeviceMesh.from_group(axes, device.type, mesh=table, mesh_dim_names=shape.names)
    return Arena(device=device, mesh=mesh, group=group, silent=True)


def _whole_group(shape: MeshShape, backend: str | None) -> dist.ProcessGroup:
    if backend is None and shape.ranks == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    if dist.get_backend() == backend:
        world = dist.group.WORLD
        assert world is not None
        if shape.ranks == world.size():
            return world
    made: dist.ProcessGroup = dist.new_group(list(range(shape.ranks)), backend=backend)
    return made


def _own(ranks: list[int], rank: int, backend: str) -> dist.ProcessGroup | None:
    """Return the group of these ranks, on its own ranks."""
    group = dist.new_group(ranks, backend=backend)
    return group if rank in ranks else None
