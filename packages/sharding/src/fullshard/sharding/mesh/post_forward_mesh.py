"""The mesh over which shards are kept between forward and backward: ``reshard_after_forward=8``.

Owns its process group: neighbours on the sharding axis. Backward then gathers over few ranks, one
host's perhaps, for the memory of a larger shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo, device_of_mesh
from fullshard.sharding.mesh.subgroups import new_subgroup

__all__ = ["post_forward_mesh_info", "post_forward_meshes"]

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, FSDPMeshInfo]] = (
    weakref.WeakKeyDictionary()
)


def post_forward_meshes(
    value: object, mesh_info: FSDPMeshInfo, others: Iterable[FSDPMeshInfo] = ()
) -> dict[dist.ProcessGroup, FSDPMeshInfo]:
    """Return the post-forward mesh that ``reshard_after_forward`` asks for, per process group.

    The result has no mesh if the int means the same as True or False, or if nothing is sharded.
    Process groups are made for ``others`` only, the meshes that parameters are on.

    Args:
        value: what was passed as ``reshard_after_forward``.
        mesh_info: the mesh of the call.
        others: the meshes of its parameters.

    Raises:
        ValueError: if ``value`` is an int that does not divide the number of sharding ranks of a
            mesh.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        return {}
    sharding = [each for each in (mesh_info, *others) if each.shard_mesh_dim is not None]
    for each in sharding:
        ranks = each.shard_world_size
        if value < 1 or ranks % value:
            raise ValueError(
                f"reshard_after_forward is {value}; it must divide the {ranks} ranks over which "
                f"parameters are sharded on {each.mesh}, or be True, False or None"
            )
    return {
        each.shard_process_group: post_forward_mesh_info(each, value)
        for each in others
        if each in sharding and value not in (1, each.shard_world_size)
    }


def post_forward_mesh_info(mesh_info: FSDPMeshInfo, world_size: int) -> FSDPMeshInfo:
    """Return a mesh of this rank's ``world_size`` neighbours on the sharding axis.

    Made once per process group and size. The call makes a process group: call it on all ranks that
    shard together alike. Other ranks take no part, so each slice of a mesh may have its own.
    """
    made = _made.setdefault(mesh_info.shard_process_group, {})
    if world_size not in made:
        ranks = dist.get_process_group_ranks(mesh_info.shard_process_group)
        first = mesh_info.shard_rank // world_size * world_size
        neighbours = new_subgroup(
            ranks[first : first + world_size],
            mesh_info.shard_process_group,
            device_of_mesh(mesh_info.mesh),
        )
        made[world_size] = FSDPMeshInfo(
            DeviceMesh.from_group(neighbours, mesh_info.mesh.device_type)
        )
    return made[world_size]
