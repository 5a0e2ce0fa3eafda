"""How a parameter is sharded, and what it must be for that: cut, gathered, used and reduced.

Owns the three ways: tensors with rows to cut, 0-d tensors, which every rank stores, and parameters
that are ``DTensor`` before ``fully_shard`` (tensor, expert, sequence parallelism). For a
``DTensor`` parameter, every rank's local part is cut, gathered and reduced like a plain parameter,
over the ranks that hold this part; the sharded parameter is a ``DTensor`` on the data parallel axes
and its own axes together. In forward and backward it is the original ``DTensor``. Overlapping
meshes are refused, except for one that holds all axes and names the data parallel ones
(``dp_mesh_dims``). Partial sums are refused too. Memory and modules are left to other files.

[Note: what travels] Each class defines a plain tensor that the ranks of a parameter group share,
cut on one dim. For most it is the parameter. For a 0-d parameter the tensor has one element per
rank: a rank's shard is its own element, and the unsharded parameter is the first element. The
gradient is copied into all elements, so that each rank's part of the reduction is the whole sum.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fullshard.comm import TensorSpec
from fullshard.sharding.base.compat import (
    ShardingSpec,
    concatenated_mesh,
    finished,
    local_of,
    local_shard,
    make_dtensor,
    make_spec,
    spec_of,
    strided_shard,
)
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo, TwoLevelMeshInfo

__all__ = ["GATHER_HOOKS", "has_hooks", "require_same_hooks", "require_shardable", "sharding_of"]

# torch's names of the methods of a parameter, or of its local part, called around its gather
GATHER_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def sharding_of(param: torch.Tensor, mesh_info: FSDPMeshInfo, dim: int, name: str) -> ParamSharding:
    """Return the sharding of ``param``, which is to be cut on ``dim``.

    Raises:
        ValueError: if ``param`` is a ``DTensor`` that cannot be sharded over this mesh too.
    """
    if not isinstance(param, DTensor):
        kind = ParamSharding if param.ndim else ScalarSharding
        whole = kind(param, mesh_info, dim)
        if isinstance(mesh_info, TwoLevelMeshInfo):
            _require_without_hooks(name, param)
            whole.second = kind(whole.like_part(param), mesh_info.second, dim)
        return whole
    own = spec_of(param)
    if any(placement.is_partial() for placement in own.placements):
        raise ValueError(
            f"{name} is a DTensor with placements {own.placements}; fully_shard takes parameters "
            "that are sharded or replicated: redistribute it first"
        )
    if isinstance(mesh_info, TwoLevelMeshInfo):
        raise ValueError(
            f"{name} is a DTensor with placements {own.placements}, and placements= would cut it "
            "over two levels; let compute and gradients name no axis, or all axes"
        )
    inner = sharding_of(local_shard(param), mesh_info, dim, name)
    return TensorParallelSharding(param, inner, name)


class ParamSharding:
    """The ordinary way: each rank stores ``1 / world_size`` of a tensor, cut on one dim.

    Attributes:
        spec: mesh, placements, shape and dtype of the sharded parameter and of its gradient.
        shape: the shape of what travels; see [Note: what travels].
        dim: the dim that is cut.
        mesh_info: what it is sharded over.
        travels_whole: whether what travels is the parameter: a dense gradient is reduced as it is.
        second: how this rank's part is cut again, on a two-level mesh; None: it is stored whole.
    """

    travels_whole = True
    second: ParamSharding | None = None

    def __init__(self, like: torch.Tensor, mesh_info: FSDPMeshInfo, dim: int) -> None:
        """Take shape and dtype from ``like``."""
        self.shape = torch.Size(like.shape)
        self.dim = dim
        self.spec: ShardingSpec = make_spec(mesh_info.mesh, mesh_info.placements(dim), like)
        self.mesh_info = mesh_info

    def spec_in(self, dtype: torch.dtype) -> TensorSpec:
        """Return the spec of what travels, if it does in ``dtype``."""
        return TensorSpec(shape=tuple(self.shape), dtype=dtype, dim=self.dim)

    @property
    def second_cut(self) -> ParamSharding:
        """How this rank's part is cut again; on a two-level mesh only."""
        assert self.second is not None, "the mesh has two levels"
        return self.second

    def like_part(self, param: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the meta device like this rank's part over the first level."""
        mesh_info = self.mesh_info
        shape = self.spec_in(param.dtype).shard_shape(
            mesh_info.shard_rank, mesh_info.shard_world_size
        )
        return torch.empty(shape, dtype=param.dtype, device="meta")

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return what this rank stores of a full tensor: a contiguous copy."""
        part = self.mesh_info.shard_of(full, self.dim)
        return part if self.second is None else self.second.shard_of(part)

    def to_travel(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what this rank stores as its shard of what travels."""
        return stored

    def to_store(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a shard of what travels as this rank stores it."""
        return shard

    def to_use(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return what modules see of what was gathered: it shares its memory."""
        return gathered

    def to_reduce(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradient of what modules see, as a plain tensor of the shape that travels.

        Dense: ``nn.Embedding(sparse=True)`` has a sparse one. The reduction uses ``dtype``.
        """
        return gradient if gradient.layout == torch.strided else gradient.to_dense()


class ScalarSharding(ParamSharding):
    """A 0-d tensor: every rank stores it; see [Note: what travels]."""

    travels_whole = False

    def __init__(self, like: torch.Tensor, mesh_info: FSDPMeshInfo, dim: int) -> None:
        """Take the dtype from ``like``; there is one dim to cut."""
        self.shape = torch.Size((mesh_info.shard_world_size,))
        self.dim = 0
        self.spec = make_spec(mesh_info.mesh, (Replicate(),) * mesh_info.mesh.ndim, like)
        self.mesh_info = mesh_info

    def like_part(self, param: torch.Tensor) -> torch.Tensor:
        """Return a 0-d tensor on the meta device: every rank stores the whole."""
        return torch.empty((), dtype=param.dtype, device="meta")

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``full``."""
        return full.clone()

    def to_travel(self, stored: torch.Tensor) -> torch.Tensor:
        """Return ``stored`` as this rank's element."""
        return stored.reshape(1)

    def to_store(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this rank's element without its dim."""
        return shard.reshape(())

    def to_use(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return the first element: a view."""
        return gathered[0]

    def to_reduce(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``gradient`` as every rank's element."""
        return gradient.reshape(1).repeat(self.shape[0])


class TensorParallelSharding(ParamSharding):
    """A ``DTensor``, whose local part is sharded as a plain tensor."""

    travels_whole = False

    def __init__(self, param: DTensor, inner: ParamSharding, name: str) -> None:
        """Take mesh and placements in forward and backward from ``param``."""
        self._inner = inner
        self.shape = inner.shape
        self.dim = inner.dim
        self.mesh_info = mesh_info = inner.mesh_info
        self._own = own = spec_of(param)
        self._specs = {param.dtype: own}  # by the dtype in which it is gathered
        self._data_axes: frozenset[int] = frozenset()  # axes of the parameter's own mesh
        if mesh_info.spmd_mesh is not None and own.mesh == mesh_info.spmd_mesh:
            names = own.mesh.mesh_dim_names
            assert names is not None, "they were found by name"
            self._data_axes = frozenset(map(names.index, mesh_info.data_parallel_axes))
            mesh, placements = _placed_within(inner, own, self._data_axes, name)
        else:
            mesh, placements = _placed_beside(inner, own, name)
        self.spec = make_spec(mesh, placements, param)

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of its part of ``full``, a plain tensor or as it was placed."""
        if not isinstance(full, DTensor):
            full = distribute_tensor(full, self._own.mesh, self._own.placements, src_data_rank=None)
        return self._inner.shard_of(local_shard(full))

    def to_travel(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what a plain parameter of this rank's part would."""
        return self._inner.to_travel(stored)

    def to_store(self, shard: torch.Tensor) -> torch.Tensor:
        """Return what a plain parameter of this rank's part would."""
        return self._inner.to_store(shard)

    def to_use(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return the ``DTensor`` as it came."""
        if gathered.dtype not in self._specs:
            like = torch.empty(self._own.shape, dtype=gathered.dtype, device="meta")
            self._specs[gathered.dtype] = make_spec(self._own.mesh, self._own.placements, like)
        return make_dtensor(self._inner.to_use(gathered), self._specs[gathered.dtype])

    def to_reduce(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's part of ``gradient``, added up over its own axes where it is not.

        Over data parallel axes the reduction adds up, so there a sum stays as it is. Sums over
        its own axes are no less precise than those: they are in ``dtype``, where that is wider.
        """
        assert isinstance(gradient, DTensor), "the gradient of a DTensor is one"
        wanted = tuple(
            found if axis in self._data_axes and found.is_partial() else placement
            for axis, (placement, found) in enumerate(
                zip(self._own.placements, gradient.placements, strict=True)
            )
        )
        if wanted != gradient.placements:
            wide = gradient.to(torch.promote_types(gradient.dtype, dtype))
            assert isinstance(wide, DTensor), "a cast keeps the type"
            gradient = wide.redistribute(placements=wanted)
        return self._inner.to_reduce(finished(local_shard(gradient)), dtype)


# -- mesh and placements of the sharded parameter -------------------------------------------------


def _placed_beside(
    inner: ParamSharding, own: ShardingSpec, name: str
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the data parallel axes, then the parameter's own, and the placements on them."""
    data = inner.mesh_info.mesh
    try:
        mesh = concatenated_mesh([data, own.mesh])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{name} is a DTensor on {own.mesh}, and fully_shard got {data}: they must "
            "be different named axes of one mesh. Make mesh = init_device_mesh(device, (dp, tp), "
            "mesh_dim_names=('dp', 'tp')), give mesh['tp'] to parallelize_module and mesh['dp'] to "
            "fully_shard; or all of it to both, and dp_mesh_dims to fully_shard"
        ) from error
    return mesh, _cut_last(inner, own, 0) + own.placements


def _placed_within(
    inner: ParamSharding, own: ShardingSpec, data_axes: frozenset[int], name: str
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the parameter's own mesh, its sharding axes flattened if they are several."""
    mesh_info, names = inner.mesh_info, own.mesh.mesh_dim_names
    dims = mesh_info.dp_mesh_dims
    assert names is not None and dims is not None, "they were found by name"
    for axis in data_axes:
        if not own.placements[axis].is_replicate():
            raise ValueError(
                f"{name} is a DTensor with {own.placements[axis]} on axis {names[axis]!r}, which "
                "dp_mesh_dims says is data parallel; there it must be Replicate()"
            )
    if not dims.shard_names:
        return own.mesh, own.placements
    first = names.index(dims.shard_names[0])
    cut = _cut_last(inner, own, first + 1)
    placements = list(own.placements)
    if len(dims.shard_names) == 1:
        placements[first] = cut[mesh_info.shard_mesh_dim or 0]
        return own.mesh, tuple(placements)
    meshes, placements = [], []
    for axis, placement in enumerate(own.placements):
        if axis == first:
            meshes.append(mesh_info.mesh)
            placements.extend(cut)
        elif axis not in data_axes:
            meshes.append(own.mesh[names[axis]])
            placements.append(placement)
    return concatenated_mesh(meshes), tuple(placements)


def _cut_last(inner: ParamSharding, own: ShardingSpec, later: int) -> tuple[Placement, ...]:
    """Return the placements on data parallel axes, after its own axes from ``later`` on have cut.

    Placements are read from left to right, as if the data parallel axis had cut first.
    """
    axes = zip(own.placements[later:], own.mesh.shape[later:], strict=True)
    parts = math.prod(size for each, size in axes if getattr(each, "dim", None) == inner.dim)
    return tuple(
        each if each.is_replicate() or parts == 1 else strided_shard(inner.dim, parts)
        for each in inner.spec.placements
    )


# -- what it must be ------------------------------------------------------------------------------


def require_shardable(name: str, param: nn.Parameter) -> None:
    """Return if ``param`` can be sharded.

    Raises:
        ValueError: if not, naming it and saying what to do.
    """
    if param.layout != torch.strided:
        raise ValueError(f"{name} has layout {param.layout}; fully_shard takes strided parameters")
    has_hooks(name, local_of(param))


def _require_without_hooks(name: str, local: torch.Tensor) -> None:
    if has_hooks(name, local):
        raise ValueError(
            f"{name} is a {type(local).__name__} with {GATHER_HOOKS[0]}, and placements= would "
            "gather it in two steps, which such hooks do not support; let compute and gradients "
            "name no axis, or all axes"
        )


def has_hooks(name: str, local: torch.Tensor) -> bool:
    """Return whether this rank's part of the parameter ``name`` has hooks around its gather.

    Raises:
        ValueError: if it has one of the two.
    """
    first, last = GATHER_HOOKS
    before, after = hasattr(local, first), hasattr(local, last)
    if before == after:
        return before
    has, lacks = GATHER_HOOKS if before else GATHER_HOOKS[::-1]
    raise ValueError(
        f"{name} is a {type(local).__name__} with {has} but no {lacks}; define both or none"
    )


def require_same_hooks(name: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Return if ``after``, made of ``before``, has hooks around its gather where that class has.

    Hooks that were put on one tensor object only may be lost, as the object is.

    Raises:
        ValueError: if they were lost.
    """
    kind, made = type(local_of(before)), local_of(after)
    if has_hooks(name, made) or not all(hasattr(kind, hook) for hook in GATHER_HOOKS):
        return
    raise ValueError(
        f"{name} was a {kind.__name__} and became a {type(made).__name__} without "
        f"{GATHER_HOOKS[0]}; make __torch_dispatch__ of {kind.__name__} keep the class in "
        "aten.split, aten.new_zeros, aten.detach and aten.empty_like, and load with assign=False"
    )
