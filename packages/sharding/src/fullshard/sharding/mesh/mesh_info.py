"""The device mesh as fully sharded data parallel sees it: who shards, who replicates.

Owns the forms of mesh and the process groups read from them: one that shards, one that also
replicates, one that shards on two levels, one that only replicates. No collective is started here.
``mesh_axes`` turns a user's mesh and axis names into these forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fullshard.comm import TensorSpec
from fullshard.sharding.mesh.subgroups import known_subgroup

__all__ = [
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "HSDPMeshInfo",
    "TwoLevelMeshInfo",
    "axis_names",
    "device_of_mesh",
    "device_type_of",
]


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which axes of a larger mesh are data parallel; for ``fully_shard(dp_mesh_dims=...)``.

    Several axes act as one, flattened in the mesh's order.

    Attributes:
        shard: name of the axis that shards parameters, or a tuple of names; None: none does.
        replicate: name of the axis that replicates them, or a tuple of names; None: none does.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            TypeError: if one is neither a name nor a sequence of names.
            ValueError: if no axis is named, or one twice.
        """
        for name in ("shard", "replicate"):
            names = axis_names(self, name)
            if not isinstance(getattr(self, name), str):
                object.__setattr__(self, name, names)
        names = self.replicate_names + self.shard_names
        if not names:
            raise ValueError("DataParallelMeshDims names no axis; set shard, replicate, or both")
        if len(set(names)) < len(names):
            raise ValueError(f"DataParallelMeshDims names an axis twice: {self}; name each once")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names of the axes that shard."""
        return axis_names(self, "shard") or ()

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names of the axes that replicate."""
        return axis_names(self, "replicate") or ()


def axis_names(choice: object, name: str) -> tuple[str, ...] | None:
    """Return the names of axes in the field ``name``, which holds one or several; None for None.

    Raises:
        TypeError: if the field holds anything else.
    """
    value: Any = getattr(choice, name)
    if value is None:
        return None
    several = isinstance(value, Sequence) and not isinstance(value, str)
    names = tuple(value) if several else (value,)
    if not all(isinstance(each, str) for each in names):
        raise TypeError(
            f"{name} of {type(choice).__name__} is {value!r}; pass the name of an axis, a tuple "
            "of names, or None"
        )
    return names


@dataclass(frozen=True)
class FSDPMeshInfo:
    """A 1-D mesh that shards parameters.

    Fields have torch's names, as users make these for ``ShardPlacementResult``.

    Attributes:
        mesh: the mesh, with data parallel axes only.
        shard_mesh_dim: the axis of it over which parameters are sharded.
        replicate_mesh_dim: the axis over which shards are replicated; None here.
        dp_mesh_dims: which axes of ``spmd_mesh`` made ``mesh``, if it was made from a larger one.
        spmd_mesh: that larger mesh.
        placed_on: the mesh whose axes ``ShardingPlacements`` named.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = 0
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = field(default=None, repr=False)
    placed_on: DeviceMesh | None = field(default=None, repr=False, compare=False)

    _axes: ClassVar[tuple[str, ...]] = ("shard_mesh_dim",)

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            TypeError: if ``mesh`` is not a ``DeviceMesh``.
            ValueError: if ``mesh`` lacks an axis, or its ranks do not ascend on each axis.
        """
        name = type(self).__name__
        if not isinstance(self.mesh, DeviceMesh):
            raise TypeError(
                f"mesh of {name} is a {type(self.mesh).__name__}; pass a "
                "torch.distributed.device_mesh.DeviceMesh"
            )
        axes = {getattr(self, axis) for axis in self._axes}
        given = {axis: getattr(self, axis) for axis in ("shard_mesh_dim", "replicate_mesh_dim")}
        strays = [axis for axis in given if axis not in self._axes and given[axis] is not None]
        if axes != {*range(self.mesh.ndim)} or strays:
            raise ValueError(
                f"{name} got a mesh of shape {tuple(self.mesh.shape)} with "
                f"{' and '.join(f'{axis}={given[axis]}' for axis in given)}; it takes a mesh of "
                f"{len(self._axes)} axes, given by {' and '.join(self._axes)}. A slice of a larger "
                "one, mesh['name'], has fewer axes; FSDPMeshInfo shards, HSDPMeshInfo also "
                "replicates, DDPMeshInfo only replicates"
            )
        for axis in range(self.mesh.ndim):
            if bool((self.mesh.mesh.diff(dim=axis) < 0).any()):
                raise ValueError(
                    f"ranks descend along axis {axis} of mesh {self.mesh.mesh.tolist()}; "
                    "collectives order ranks by number, so number them upwards along each axis"
                )

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return the placements of a parameter that is cut on ``dim``, in mesh order."""
        by_axis = {self.shard_mesh_dim: Shard(dim), self.replicate_mesh_dim: Replicate()}
        return tuple(by_axis[axis] for axis in range(self.mesh.ndim))

    def shard_of(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of ``full``, cut on ``dim``: a contiguous copy.

        Shape: ``full`` with ``ceil(n / world)`` rows on ``dim``, fewer or no rows on the last ranks
        (the cut of ``torch.chunk``).
        """
        spec = TensorSpec(shape=tuple(full.shape), dtype=full.dtype, dim=dim)
        shape = spec.shard_shape(self.shard_rank, self.shard_world_size)
        part = full.new_zeros(shape)
        if part.numel() == 0:
            return part
        if hasattr(full, "__tensor_flatten__"):
            # chunk, new_zeros, copy_: a subclass made for torch's own fully_shard knows these
            return part.copy_(full.chunk(self.shard_world_size, dim)[self.shard_rank])
        start = spec.first_row(self.shard_rank, self.shard_world_size)
        return part.copy_(full.narrow(dim, start, shape[dim]))

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Every process group over which this rank communicates: shards, then the second axis."""
        return tuple(self.mesh.get_group(getattr(self, axis)) for axis in self._axes)

    @property
    def data_parallel_size(self) -> int:
        """Ranks that each see a part of the batch: shards times replicas."""
        return self.mesh.size()

    @property
    def data_parallel_axes(self) -> tuple[str, ...]:
        """The names of the axes of ``spmd_mesh`` that are data parallel; none without one."""
        dims = self.dp_mesh_dims
        return () if dims is None else dims.replicate_names + dims.shard_names

    @cached_property
    def shard_process_group(self) -> dist.ProcessGroup:
        """The process group over which shards are gathered and gradients reduced."""
        return self.mesh.get_group(self.shard_mesh_dim)

    @cached_property
    def shard_world_size(self) -> int:
        """Ranks over which full parameters are gathered: of two levels, those of the first."""
        return self.shard_process_group.size()

    @cached_property
    def shard_rank(self) -> int:
        """This rank's place among them."""
        return self.shard_process_group.rank()


@dataclass(frozen=True)
class HSDPMeshInfo(FSDPMeshInfo):
    """A 2-D mesh: parameters are sharded over one axis and replicated over the other.

    Attributes:
        shard_mesh_dim: the axis of the mesh over which parameters are sharded.
        replicate_mesh_dim: the axis over which shards are replicated.
    """

    shard_mesh_dim: int | None = 1
    replicate_mesh_dim: int | None = 0

    _axes: ClassVar[tuple[str, ...]] = ("shard_mesh_dim", "replicate_mesh_dim")

    @cached_property
    def replicate_process_group(self) -> dist.ProcessGroup:
        """The process group over which reduced gradients are all-reduced."""
        return self.mesh.get_group(self.replicate_mesh_dim)


@dataclass(frozen=True)
class TwoLevelMeshInfo(FSDPMeshInfo):
    """A 2-D mesh that cuts parameters over its first axis, and each part over its second axis.

    Full parameters are gathered over the first axis, from *compute shards*. The optimizer sees the
    parts of a compute shard. Gradients are reduced over the first axis, then over the second.

    Attributes:
        shard_mesh_dim: the axis over which compute shards are gathered.
        second_mesh_dim: the axis over which a compute shard is cut again.
    """

    second_mesh_dim: int = 1

    _axes: ClassVar[tuple[str, ...]] = ("shard_mesh_dim", "second_mesh_dim")

    @cached_property
    def second(self) -> FSDPMeshInfo:
        """The second axis by itself, over which the parts of a compute shard are gathered."""
        assert self.mesh.mesh_dim_names is not None, "the axes were found by name"
        return FSDPMeshInfo(self.mesh[self.mesh.mesh_dim_names[1]])

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return the placements of a parameter that both axes cut on ``dim``, in mesh order."""
        return Shard(dim), Shard(dim)


@dataclass(frozen=True)
class DDPMeshInfo(HSDPMeshInfo):
    """A 1-D mesh that replicates parameters: a hybrid one in which each rank shards by itself.

    Attributes:
        shard_mesh_dim: None: no axis shards.
        replicate_mesh_dim: the axis over which parameters are replicated.
    """

    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = 0

    _axes: ClassVar[tuple[str, ...]] = ("replicate_mesh_dim",)

    @cached_property
    def shard_process_group(self) -> dist.ProcessGroup:
        """A process group of this rank alone, over which nothing is sent."""
        if self.replicate_process_group.size() == 1:
            return self.replicate_process_group
        # NCCL may make communicators out of the default group, with all ranks; gloo will do for a
        # group that never sends a byte.
        backend = "gloo" if "nccl" in dist.get_backend_config() else None
        return known_subgroup(frozenset((dist.get_rank(),)), backend)


def device_type_of(process_group: dist.ProcessGroup | None = None) -> str:
    """Return the device type to compute on: an accelerator with a backend in the group, or the CPU.

    The build of torch does not decide: a CUDA build may run without a card, and its gloo groups
    support CUDA tensors.

    Args:
        process_group: None: the default one.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    served = f",{dist.get_backend_config(process_group)}"  # ",cpu:gloo,cuda:nccl"
    return accelerator.type if accelerator and f",{accelerator.type}:" in served else "cpu"


def device_of_mesh(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank computes: the CPU, or the current accelerator."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    index = torch.get_device_module(mesh.device_type).current_device()
    return torch.device(mesh.device_type, index)
