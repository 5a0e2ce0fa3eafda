"""The mesh over which compute shards are kept from forward to backward.

Owns its process group: with ``reshard_after_forward=8``, 8 neighbours on the sharding axis.
Backward then gathers over few ranks, one host's perhaps, for the memory of a larger shard.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo, device_of_mesh
from fullshard.sharding.mesh.subgroups import new_subgroup

__all__ = ["post_forward_mesh", "require_divides"]

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, FSDPMeshInfo]] = (
    weakref.WeakKeyDictionary()
)


def require_divides(ranks: int, mesh_info: FSDPMeshInfo) -> None:
    """Return if ``ranks`` neighbours can keep compute shards, or if nothing is sharded.

    Raises:
        ValueError: if ``ranks`` does not divide the number of ranks that shard.
    """
    if mesh_info.shard_mesh_dim is not None and (ranks < 1 or mesh_info.shard_world_size % ranks):
        raise ValueError(
            f"reshard_after_forward is {ranks}; it must divide the {mesh_info.shard_world_size} "
            f"ranks over which parameters are sharded on {mesh_info.mesh}, or be True, False or "
            "None"
        )


def post_forward_mesh(mesh_info: FSDPMeshInfo, ranks: int | None) -> FSDPMeshInfo | None:
    """Return a mesh of this rank's ``ranks`` neighbours on the sharding axis.

    Made once per process group and size. The call makes a process group: call it on all ranks that
    shard together alike. Other ranks take no part, so each slice of a mesh may have its own.

    Args:
        mesh_info: the mesh that parameters are on.
        ranks: how many, a divisor of those that shard; None: no compute shards are kept.

    Returns:
        The mesh; None if no compute shards are kept: also if nothing is sharded, or if ``ranks``
        means the same as False or True.
    """
    if mesh_info.shard_mesh_dim is None or ranks in (None, 1, mesh_info.shard_world_size):
        return None
    made = _made.setdefault(mesh_info.shard_process_group, {})
    if ranks not in made:
        sharding = dist.get_process_group_ranks(mesh_info.shard_process_group)
        first = mesh_info.shard_rank // ranks * ranks
        neighbours = new_subgroup(
            sharding[first : first + ranks],
            mesh_info.shard_process_group,
            device_of_mesh(mesh_info.mesh),
        )
        made[ranks] = FSDPMeshInfo(DeviceMesh.from_group(neighbours, mesh_info.mesh.device_type))
    return made[ranks]
