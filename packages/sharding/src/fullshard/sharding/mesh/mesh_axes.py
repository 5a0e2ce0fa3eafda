"""From a user's mesh, and the names of its data parallel axes, to what the engine needs to know.

Owns the checks on what was passed, the default mesh, and the flattening of several axes into one.
Flattening makes process groups, once per mesh, on all its ranks alike; nothing else communicates.
"""

from __future__ import annotations

from functools import partial

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
from fullshard.sharding.mesh.subgroups import made_once

__all__ = ["default_mesh", "mesh_info_of", "nested_mesh", "one_axis", "require_mesh"]


def mesh_info_of(
    mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None, *, replicated: bool = False
) -> FSDPMeshInfo:
    """Return what the engine needs to know of ``mesh``.

    Args:
        mesh: a 1-D mesh, which shards; a 2-D one, which replicates over its first axis and shards
            over its second; or, with ``dims``, a larger one; None: all ranks, which shard.
        dims: which axes of ``mesh`` shard and replicate.
        replicated: what is 1-D, or a default, replicates; no axis may shard.

    Raises:
        TypeError: if ``mesh`` is not a ``DeviceMesh``, or ``dims`` not a ``DataParallelMeshDims``.
        ValueError: if ``mesh`` has too many dimensions or lacks this rank. Also if ``dims`` names
            other axes, another order, or a sharding axis where none is allowed.
        RuntimeError: if ``mesh`` is None and ``torch.distributed`` was not initialised.
    """
    if mesh is None:
        mesh = default_mesh(("replicate",) if replicated else None)
    require_mesh(mesh)
    if dims is not None:
        info = _info_of_axes(mesh, dims)
        if replicated and not isinstance(info, DDPMeshInfo):
            raise ValueError(
                f"dp_mesh_dims is {dims}; replicate takes axes that replicate only: leave shard "
                "unset, or use fully_shard"
            )
        return info
    makers = [DDPMeshInfo] if replicated else [FSDPMeshInfo, HSDPMeshInfo]
    if not 1 <= mesh.ndim <= len(makers):
        taken = "replicate takes a 1-D mesh"
        if not replicated:
            taken = "fully_shard takes a 1-D mesh, or a 2-D one (replicate, shard)"
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}; {taken}: pass axes of it, for "
            "example mesh['dp'], or say with dp_mesh_dims which of them are data parallel"
        )
    return makers[mesh.ndim - 1](mesh)


def default_mesh(names: tuple[str, ...] | None) -> DeviceMesh:
    """Return a 1-D mesh of all ranks, on the accelerator if there is one that they communicate on.

    The same object for all calls while anybody holds it: specs that are identical need no
    comparing.

    Raises:
        RuntimeError: if ``torch.distributed`` was not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group and found none; call "
            "torch.distributed.init_process_group() first (under torchrun), or pass mesh="
        )
    device_type, world = device_type_of(), dist.group.WORLD
    assert world is not None, "it was initialised"
    make = partial(init_device_mesh, device_type, (world.size(),), mesh_dim_names=names)
    return made_once(world, (device_type, names), make)


def require_mesh(mesh: object) -> DeviceMesh:
    """Return ``mesh``, if it is a mesh of this rank.

    Raises:
        TypeError: if it is not a ``DeviceMesh``.
        ValueError: if this rank is not in it.
    """
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
    return mesh


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
        return DDPMeshInfo(one_axis(mesh, replicate), dp_mesh_dims=dims, spmd_mesh=mesh)
    if not replicate:
        return FSDPMeshInfo(one_axis(mesh, shard), dp_mesh_dims=dims, spmd_mesh=mesh)
    pair = concatenated_mesh([one_axis(mesh, replicate), one_axis(mesh, shard)])
    return HSDPMeshInfo(pair, dp_mesh_dims=dims, spmd_mesh=mesh)


def one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return a 1-D mesh over the named axes, flattened if they are several.

    Raises:
        ValueError: if they are in another order than in ``mesh``, or cannot be flattened.
    """
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


def nested_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Return a mesh of two axes of one mesh in this order, which may not be the order there.

    The result is a mesh of its own with the process groups of the axes: torch refuses to reduce
    tensors over slices in another order. The same object for all calls while anybody holds it.
    """
    groups = [first.get_group(), second.get_group()]
    names = tuple(name for each in (first, second) for name in each.mesh_dim_names or ())

    def make() -> DeviceMesh:
        ranks = concatenated_mesh([first, second]).mesh
        return DeviceMesh.from_group(groups, first.device_type, ranks, mesh_dim_names=names)

    return made_once(groups[0], ("nested", groups[1].group_name), make)
