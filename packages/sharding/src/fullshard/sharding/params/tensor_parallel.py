"""Parameters that are ``DTensor`` before ``fully_shard``: tensor, expert, sequence parallelism.

Owns what becomes of their mesh and placements. Every rank's local part is cut, gathered and reduced
like a plain parameter, over the ranks that hold the same part; the sharded parameter is a
``DTensor`` on the data parallel axes and its own ones together, and in forward and backward it is
the ``DTensor`` that it was. It refuses meshes that overlap, but for one that holds all axes and
says which are data parallel (``dp_mesh_dims``), and sums that are not added up yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fullshard.sharding.base.compat import (
    ShardingSpec,
    concatenated_mesh,
    finished,
    local_shard,
    make_dtensor,
    make_spec,
    spec_of,
    strided_shard,
)
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo
from fullshard.sharding.params.param_sharding import ParamSharding, plain_sharding

__all__ = ["TensorParallelSharding", "sharding_of"]


def sharding_of(param: torch.Tensor, mesh_info: FSDPMeshInfo, dim: int, name: str) -> ParamSharding:
    """Returns how ``param`` is sharded, which is to be cut along ``dim``.

    Raises:
        ValueError: if ``param`` is a ``DTensor`` that cannot be sharded over this mesh too.
    """
    if not isinstance(param, DTensor):
        return plain_sharding(param, mesh_info, dim)
    own = spec_of(param)
    if any(placement.is_partial() for placement in own.placements):
        raise ValueError(
            f"{name} is a DTensor with placements {own.placements}; fully_shard takes parameters "
            "that are sharded or replicated: redistribute it first"
        )
    inner = plain_sharding(local_shard(param), mesh_info, dim)
    if mesh_info.spmd_mesh is not None and own.mesh == mesh_info.spmd_mesh:
        joint = _placed_within(inner, own, mesh_info, name)
    else:
        joint = _placed_beside(inner, own, mesh_info, name)
    return TensorParallelSharding(param, inner, joint)


@dataclass(frozen=True)
class _Joint:
    """Where the sharded parameter lies.

    Attributes:
        mesh: the data parallel axes and the parameter's own.
        placements: on each of them.
        data_axes: which axes of the mesh that the parameter came on are data parallel.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    data_axes: frozenset[int] = frozenset()


class TensorParallelSharding:
    """A ``DTensor``, whose local part is sharded as a plain tensor."""

    travels_whole = False

    def __init__(self, param: DTensor, inner: ParamSharding, joint: _Joint) -> None:
        """Takes mesh and placements in forward and backward from ``param``."""
        self._inner = inner
        self.shape = inner.shape
        self.dim = inner.dim
        self.spec = make_spec(joint.mesh, joint.placements, param)
        self._own = spec_of(param)
        self._specs = {param.dtype: self._own}  # by the dtype in which it is gathered
        self._data_axes = joint.data_axes

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows of its part of ``full``, a plain tensor or as it was placed."""
        if not isinstance(full, DTensor):
            full = distribute_tensor(full, self._own.mesh, self._own.placements, src_data_rank=None)
        return self._inner.shard_of(local_shard(full))

    def to_travel(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns what a plain parameter of this rank's part would."""
        return self._inner.to_travel(stored)

    def to_store(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns what a plain parameter of this rank's part would."""
        return self._inner.to_store(shard)

    def to_use(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns the ``DTensor`` as it came."""
        if gathered.dtype not in self._specs:
            like = torch.empty(self._own.shape, dtype=gathered.dtype, device="meta")
            self._specs[gathered.dtype] = make_spec(self._own.mesh, self._own.placements, like)
        return make_dtensor(self._inner.to_use(gathered), self._specs[gathered.dtype])

    def to_reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of ``gradient``, added up over its own axes where it is not.

        Over data parallel axes the reduction adds up, so there a sum stays as it is.
        """
        assert isinstance(gradient, DTensor), "the gradient of a DTensor is one"
        wanted = tuple(
            found if axis in self._data_axes and found.is_partial() else placement
            for axis, (placement, found) in enumerate(
                zip(self._own.placements, gradient.placements, strict=True)
            )
        )
        if wanted != gradient.placements:
            gradient = gradient.redistribute(placements=wanted)
        return self._inner.to_reduce(finished(local_shard(gradient)))


# -- where the sharded parameter lies -------------------------------------------------------------


def _placed_beside(
    inner: ParamSharding, own: ShardingSpec, mesh_info: FSDPMeshInfo, name: str
) -> _Joint:
    """Returns the data parallel axes, then the parameter's own."""
    try:
        mesh = concatenated_mesh([mesh_info.mesh, own.mesh])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{name} is a DTensor on {own.mesh}, and fully_shard got {mesh_info.mesh}: they must "
            "be different named axes of one mesh. Make mesh = init_device_mesh(device, (dp, tp), "
            "mesh_dim_names=('dp', 'tp')), give mesh['tp'] to parallelize_module and mesh['dp'] to "
            "fully_shard; or all of it to both, and dp_mesh_dims to fully_shard"
        ) from error
    parts = _parts(inner.dim, zip(own.placements, own.mesh.shape, strict=True))
    cut = tuple(_cut_last(placement, parts) for placement in inner.spec.placements)
    return _Joint(mesh, cut + own.placements)


def _placed_within(
    inner: ParamSharding, own: ShardingSpec, mesh_info: FSDPMeshInfo, name: str
) -> _Joint:
    """Returns the parameter's own mesh, with its sharding axes flattened if they are several."""
    names = own.mesh.mesh_dim_names
    dims = mesh_info.dp_mesh_dims
    assert names is not None and dims is not None, "they were found by name"
    data_axes = frozenset(names.index(each) for each in mesh_info.data_parallel_axes)
    for axis in data_axes:
        if not own.placements[axis].is_replicate():
            raise ValueError(
                f"{name} is a DTensor with {own.placements[axis]} on axis {names[axis]!r}, which "
                "dp_mesh_dims says is data parallel; there it must be Replicate()"
            )
    if not dims.shard_names:
        return _Joint(own.mesh, own.placements, data_axes)
    first = names.index(dims.shard_names[0])
    later = zip(own.placements[first + 1 :], own.mesh.shape[first + 1 :], strict=True)
    parts = _parts(inner.dim, later)
    cut = [_cut_last(placement, parts) for placement in inner.spec.placements]
    if len(dims.shard_names) == 1:
        placements = list(own.placements)
        placements[first] = cut[mesh_info.shard_mesh_dim or 0]
        return _Joint(own.mesh, tuple(placements), data_axes)
    meshes, placements = [], []
    for axis, placement in enumerate(own.placements):
        if axis == first:
            meshes.append(mesh_info.mesh)
            placements.extend(cut)
        elif axis not in data_axes:
            meshes.append(own.mesh[names[axis]])
            placements.append(placement)
    return _Joint(concatenated_mesh(meshes), tuple(placements), data_axes)


def _parts(dim: int, axes: Iterable[tuple[Placement, int]]) -> int:
    """Returns into how many parts ``axes`` cut ``dim``."""
    return math.prod(size for placement, size in axes if getattr(placement, "dim", None) == dim)


def _cut_last(placement: Placement, parts: int) -> Placement:
    """Returns ``placement`` on a data parallel axis, after later axes cut into ``parts``.

    Placements are read from left to right, as if the data parallel axis had cut first.
    """
    if placement.is_replicate() or parts == 1:
        return placement
    dim: int = placement.dim  # type: ignore[attr-defined]  # a Shard
    return strided_shard(dim, parts)
