"""The device mesh as fully sharded data parallel sees it: who shards, who replicates.

Owns the checks on a mesh and the process groups read from it; it starts no collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "default_mesh",
    "device_of_mesh",
    "mesh_info_of",
]


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a larger mesh are data parallel; for ``fully_shard(dp_mesh_dims=...)``.

    Attributes:
        shard: name of the axis that shards parameters.
        replicate: name of the axis that replicates them.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: if neither axis is named.
        """
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims names no axis; set shard, replicate, or both")


@dataclass(frozen=True, kw_only=True)
class FSDPMeshInfo:
    """A mesh whose ``shard_axis`` shards parameters.

    Attributes:
        mesh: the mesh.
        shard_axis: the mesh dimension over which parameters are sharded.
    """

    mesh: DeviceMesh
    shard_axis: int = 0

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Returns the placements of a parameter that is cut along ``dim``."""
        return (Shard(dim),)

    def shard_of(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's part of ``full``, cut along ``dim``: a contiguous copy.

        Shape: ``full`` with ``ceil(n / world)`` rows along ``dim``, fewer on the last ranks (the
        cut of ``torch.chunk``), down to none.
        """
        rows = full.size(dim)
        chunk = -(-rows // self.shard_world_size)
        start = min(self.shard_rank * chunk, rows)
        part = full.narrow(dim, start, min(chunk, rows - start))
        return part.clone(memory_format=torch.contiguous_format)

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Every process group over which this rank communicates."""
        return (self.shard_process_group,)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that each see a part of the batch."""
        return self.shard_world_size

    @cached_property
    def shard_process_group(self) -> dist.ProcessGroup:
        """The process group over which shards are gathered and gradients reduced."""
        return self.mesh.get_group(self.shard_axis)

    @cached_property
    def shard_world_size(self) -> int:
        """Ranks over which a parameter is sharded."""
        return self.mesh.size(self.shard_axis)

    @cached_property
    def shard_rank(self) -> int:
        """This rank's place among them."""
        return self.mesh.get_local_rank(self.shard_axis)


@dataclass(frozen=True, kw_only=True)
class HSDPMeshInfo(FSDPMeshInfo):
    """A 2-D mesh: parameters are sharded over one axis and replicated over the other.

    Attributes:
        replicate_axis: the mesh dimension over which shards are replicated.
    """

    shard_axis: int = 1
    replicate_axis: int = 0

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Returns the placements of a parameter that is cut along ``dim``, in mesh order."""
        pair = (Replicate(), Shard(dim))
        return pair if self.replicate_axis < self.shard_axis else pair[::-1]

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Every process group over which this rank communicates."""
        return (self.shard_process_group, self.replicate_process_group)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that each see a part of the batch: replicas times shards."""
        return self.shard_world_size * self.mesh.size(self.replicate_axis)

    @cached_property
    def replicate_process_group(self) -> dist.ProcessGroup:
        """The process group over which reduced gradients are all-reduced."""
        return self.mesh.get_group(self.replicate_axis)


def default_mesh() -> DeviceMesh:
    """Returns a 1-D mesh of all ranks, on the accelerator if the default process group drives one.

    Raises:
        RuntimeError: if ``torch.distributed`` was not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group and found none; call "
            "torch.distributed.init_process_group() first (under torchrun), or pass mesh="
        )
    backend = dist.get_backend_config()
    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu"
    if accelerator is not None and accelerator.type in backend:
        kind = accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def mesh_info_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> FSDPMeshInfo:
    """Returns what the engine needs to know of ``mesh``.

    Args:
        mesh: a 1-D mesh, which shards; a 2-D one, which replicates over its first axis and shards
            over its second; or, with ``dims``, a larger one.
        dims: which axes of ``mesh`` shard and replicate.

    Raises:
        TypeError: if ``mesh`` is not a ``DeviceMesh``, or ``dims`` not a ``DataParallelMeshDims``.
        ValueError: if it has more dimensions, or ``dims`` does not name one axis of it that shards
            and at most one that replicates.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; pass a torch.distributed.device_mesh.DeviceMesh, "
            "for example init_device_mesh('cpu', (world_size,)), or None for all ranks"
        )
    if dims is not None:
        mesh = _axes_of(mesh, dims)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {tuple(mesh.shape)}; fully_shard takes a 1-D mesh, "
            "or a 2-D one (replicate, shard): pass one or two axes of it, for example mesh['dp']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in mesh {mesh}; call fully_shard only on "
            "ranks of its mesh"
        )
    return FSDPMeshInfo(mesh=mesh) if mesh.ndim == 1 else HSDPMeshInfo(mesh=mesh)


def _axes_of(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    if not isinstance(dims, DataParallelMeshDims):
        raise TypeError(
            f"dp_mesh_dims is a {type(dims).__name__}; pass a DataParallelMeshDims or None"
        )
    if not isinstance(dims.shard, str) or not isinstance(dims.replicate, (str, type(None))):
        raise ValueError(
            f"dp_mesh_dims is {dims}; sharding or replicating over several axes, and replicating "
            "only, are not supported yet: name one axis that shards, at most one that replicates"
        )
    wanted = (dims.shard,) if dims.replicate is None else (dims.replicate, dims.shard)
    names = mesh.mesh_dim_names or ()
    for axis in wanted:
        if axis not in names:
            raise ValueError(f"dp_mesh_dims names axis {axis!r}; the mesh has {names}")
    return mesh[wanted]


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """Returns the device on which this rank computes: the CPU, or the current accelerator."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)
