"""From a user's mesh, and the names of its data parallel axes, to what the engine needs to know.

Owns the checks on what was passed, the default mesh, and the flattening of several axes into one.
Flattening makes process groups, once per mesh, on all its ranks alike; nothing else communicates.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.sharding.base.compat import concatenated_mesh, flatten_mesh
from fullshard.sharding.base.torch_objects import converted
from fullshard.sharding.mesh.mesh_info import (
    DataParallelMeshDims,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    device_type_of,
)

__all__ = ["default_mesh", "mesh_info_of", "replica_mesh_info_of"]


_default_meshes: dict[
    tuple[str, str | None], tuple[weakref.ref[dist.ProcessGroup], weakref.ref[DeviceMesh]]
] = {}


def default_mesh(name: str | None = None) -> DeviceMesh:
    """Returns a 1-D mesh of all ranks, on the accelerator if there is one that they communicate on.

    The same object for all calls while anybody holds it: specs that are identical need no
    comparing.

    Args:
        name: of its axis.

    Raises:
        RuntimeError: if ``torch.distributed`` was not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group and found none; call "
            "torch.distributed.init_process_group() first (under torchrun), or pass mesh="
        )
    kind = device_type_of()
    world, made = _default_meshes.get((kind, name), (None, None))
    mesh = made() if made is not None else None
    if mesh is None or world is None or world() is not dist.group.WORLD:
        names = None if name is None else (name,)
        mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=names)
        assert dist.group.WORLD is not None, "it was initialised"
        _default_meshes[kind, name] = weakref.ref(dist.group.WORLD), weakref.ref(mesh)
    return mesh


def mesh_info_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> FSDPMeshInfo:
    """Returns what the engine needs to know of ``mesh``.

    Args:
        mesh: a 1-D mesh, which shards; a 2-D one, which replicates over its first axis and shards
            over its second; or, with ``dims``, a larger one.
        dims: which axes of ``mesh`` shard and replicate.

    Raises:
        TypeError: if ``mesh`` is not a ``DeviceMesh``, or ``dims`` not a ``DataParallelMeshDims``.
        ValueError: if it has more dimensions, if ``dims`` does not name axes of it in its order, or
            if this rank is not in it.
    """
    _require_mesh(mesh)
    if dims is not None:
        return _info_of_axes(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}; fully_shard takes a 1-D mesh, "
            "or a 2-D one (replicate, shard): pass one or two axes of it, for example mesh['dp'], "
            "or say with dp_mesh_dims which of them are data parallel"
        )
    return FSDPMeshInfo(mesh) if mesh.ndim == 1 else HSDPMeshInfo(mesh)


def replica_mesh_info_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> DDPMeshInfo:
    """Returns what the engine needs to know of a mesh over which ``replicate`` replicates.

    Args:
        mesh: a 1-D mesh or, with ``dims``, a larger one.
        dims: which axes of ``mesh`` replicate.

    Raises:
        TypeError: if ``mesh`` is not a ``DeviceMesh``, or ``dims`` not a ``DataParallelMeshDims``.
        ValueError: if it has more dimensions, if ``dims`` names axes that shard or are not there,
            or if this rank is not in it.
    """
    _require_mesh(mesh)
    if dims is None:
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}; replicate takes a 1-D mesh: "
                "pass one axis of it, for example mesh['dp'], or name axes with dp_mesh_dims"
            )
        return DDPMeshInfo(mesh)
    info = _info_of_axes(mesh, dims)
    if not isinstance(info, DDPMeshInfo):
        raise ValueError(
            f"dp_mesh_dims is {dims}; replicate takes axes that replicate only: leave shard unset, "
            "or use fully_shard"
        )
    return info


def _require_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; pass a torch.distributed.device_mesh.DeviceMesh, "
            "for example init_device_mesh('cpu', (world_size,)), or None for all ranks"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in mesh {mesh}; call fully_shard and replicate only "
            "on ranks of their mesh"
        )


def _info_of_axes(mesh: DeviceMesh, dims: DataParallelMeshDims) -> FSDPMeshInfo:
    dims = converted(dims, {"DataParallelMeshDims": DataParallelMeshDims})
    if not isinstance(dims, DataParallelMeshDims):
        raise TypeError(
            f"dp_mesh_dims is a {type(dims).__name__}; pass a DataParallelMeshDims of "
            "fullshard.sharding, or None"
        )
    shard, replicate = dims.shard_names, dims.replicate_names
    names = mesh.mesh_dim_names or ()
    for axis in replicate + shard:
        if axis not in names:
            raise ValueError(f"dp_mesh_dims names axis {axis!r}; the mesh has {names}")
    if not shard:
        return DDPMeshInfo(_one_axis(mesh, replicate), dp_mesh_dims=dims, spmd_mesh=mesh)
    if not replicate:
        return FSDPMeshInfo(_one_axis(mesh, shard), dp_mesh_dims=dims, spmd_mesh=mesh)
    pair = replicate + shard
    if len(pair) == 2 and names.index(pair[0]) < names.index(pair[1]):
        joint = mesh[pair]
    else:
        joint = concatenated_mesh([_one_axis(mesh, replicate), _one_axis(mesh, shard)])
    return HSDPMeshInfo(joint, dp_mesh_dims=dims, spmd_mesh=mesh)


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Returns a 1-D mesh over the named axes, flattened if they are several."""
    if len(names) == 1:
        return mesh[names[0]]
    order = tuple(name for name in mesh.mesh_dim_names or () if name in names)
    if order != names:
        raise ValueError(
            f"dp_mesh_dims names {names}, but the mesh has them in the order {order}; name them in "
            "its order"
        )
    try:
        return flatten_mesh(mesh[names], "_".join(names))
    except ValueError as error:
        raise ValueError(
            f"the axes {names} of dp_mesh_dims cannot be flattened into one named "
            f"{'_'.join(names)!r}: {error}"
        ) from error
