"""Shards over a smaller world, kept between forward and backward: ``reshard_after_forward=8``, say.

Owns those shards and the mesh they live on. Backward then gathers over few ranks, one host's
perhaps, for the memory of a larger shard. The modules hold the ordinary sharded parameters
meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm import Layout
from fullshard.sharding.mesh import FSDPMeshInfo
from fullshard.sharding.param import FSDPParam
from fullshard.sharding.plan import GroupPlan

__all__ = ["SmallerWorld", "require_divisor", "smaller_mesh_info"]

_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, FSDPMeshInfo]] = (
    weakref.WeakKeyDictionary()
)


def smaller_mesh_info(mesh_info: FSDPMeshInfo, world_size: int) -> FSDPMeshInfo:
    """Returns a mesh over whose second axis each ``world_size`` neighbouring ranks shard.

    Made once per process group and size. It makes process groups: call it on all ranks alike.
    """
    made = _meshes.setdefault(mesh_info.shard_process_group, {})
    if world_size not in made:
        mesh = mesh_info.mesh
        rows = mesh.mesh.movedim(mesh_info.shard_axis, -1).reshape(-1, world_size)
        made[world_size] = FSDPMeshInfo(mesh=DeviceMesh(mesh.device_type, rows), shard_axis=1)
    return made[world_size]


def require_divisor(world_size: int, mesh_info: FSDPMeshInfo) -> None:
    """Returns if ``world_size`` divides the ranks that shard.

    Raises:
        ValueError: if not, saying how many they are.
    """
    ranks = mesh_info.shard_world_size
    if world_size < 1 or ranks % world_size:
        raise ValueError(
            f"reshard_after_forward is {world_size}; it must divide the {ranks} ranks over which "
            "parameters are sharded, or be True, False or None"
        )


class SmallerWorld:
    """One group's shards over a smaller world.

    Attributes:
        mesh_info: the smaller world.
        shards: per parameter this rank's part in it, in the gathered dtype; empty unless kept.
    """

    def __init__(self, mesh_info: FSDPMeshInfo) -> None:
        """Starts with none kept."""
        self.mesh_info = mesh_info
        self.shards: list[torch.Tensor] = []
        self._layouts: dict[Layout, Layout] = {}

    @torch.no_grad()
    def keep(self, params: Sequence[FSDPParam]) -> None:
        """Cuts the unsharded parameters, which must be there."""
        self.shards = [
            self.mesh_info.shard_of(param.unsharded.detach(), param.dim) for param in params
        ]

    def drop(self) -> None:
        """Frees the shards."""
        self.shards = []

    def layout(self, params: Sequence[FSDPParam], gather: Layout) -> Layout:
        """Returns the layout of a gather over this world; ``gather`` is the whole mesh's."""
        if gather not in self._layouts:
            self._layouts[gather] = GroupPlan.of(params, self.mesh_info.shard_world_size).gather
        return self._layouts[gather]
