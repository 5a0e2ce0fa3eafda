"""``replicate``: data parallel on the engine of ``fully_shard``.

Owns the function and the class that it mixes in. Parameters stay whole on each rank; gradients are
all-reduced, a group at a time, while backward goes on. It is hybrid sharding in which each rank
shards by itself: no state machine of its own.
"""

from __future__ import annotations

from typing import TypedDict, TypeVar, Unpack, cast, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding.api.arguments import ignored_of, modules_of
from fullshard.sharding.api.construction import Construction, construct
from fullshard.sharding.api.managed import find_managed
from fullshard.sharding.api.module import FSDPModule, mixed_class_of
from fullshard.sharding.api.placements import cuts_of
from fullshard.sharding.base.required import require
from fullshard.sharding.mesh.mesh_axes import default_mesh, replica_mesh_info_of
from fullshard.sharding.mesh.mesh_info import DataParallelMeshDims
from fullshard.sharding.protocols import (
    FixedReshard,
    FullPrecision,
    NoOffload,
    Offload,
    Policies,
    PrecisionPolicy,
)

__all__ = ["ReplicateModule", "replicate"]

_M = TypeVar("_M", bound=nn.Module)


class ReplicateModule(FSDPModule):
    """A module whose parameters are replicated. Made by ``replicate``, never constructed.

    Has every method of ``FSDPModule``: gradient accumulation, state dicts and the like are the
    same.
    """


class ReplicateOptions(TypedDict, total=False):
    """The keyword arguments of ``replicate``, for type checkers."""

    mesh: DeviceMesh | None
    mp_policy: PrecisionPolicy
    offload_policy: Offload
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None


@overload
def replicate(module: nn.Module, **options: Unpack[ReplicateOptions]) -> ReplicateModule: ...


@overload
def replicate(module: list[_M], **options: Unpack[ReplicateOptions]) -> list[ReplicateModule]: ...


def replicate(
    module: nn.Module | list[_M],
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: PrecisionPolicy = FullPrecision(),  # noqa: B008  # frozen
    offload_policy: Offload = NoOffload(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> ReplicateModule | list[ReplicateModule]:
    """Returns ``module``, whose parameters every rank of ``mesh`` has whole.

    The parameters of ``module`` that no earlier call took form one group, whose gradients are
    averaged over the ranks by one all-reduce while backward goes on: call it on the inner modules
    first, and on the whole model last. Outside forward and backward a parameter is a ``DTensor``
    with ``Replicate()``. From forward to backward the group holds a copy in the dtype of
    ``mp_policy``; making it sends nothing. Makes a process group of this rank alone, once.

    Args:
        module: the module, or a list of modules that form one group.
        mesh: a 1-D mesh; None: all ranks.
        mp_policy: a ``fullshard.policies.MixedPrecisionPolicy``, or any ``PrecisionPolicy``.
        offload_policy: where parameters and gradients live; any ``Offload``.
        ignored_params: parameters that stay as they are: not moved, not reduced.
        dp_mesh_dims: which axes of a larger ``mesh`` replicate.

    Returns:
        The same object, now also a ``ReplicateModule``.

    Raises:
        TypeError: if an argument is of the wrong type; the message names it and what to pass.
        ValueError: if a module was sharded or replicated before or is given twice, if the mesh has
            other dimensions, ``dp_mesh_dims`` names an axis that shards, or a parameter cannot be
            taken.
        RuntimeError: if ``mesh`` is None and ``torch.distributed`` was not initialised.
    """
    modules = modules_of(module, "replicate")
    precision = require(PrecisionPolicy, mp_policy, "mp_policy")
    offload = require(Offload, offload_policy, "offload_policy")
    ignored = ignored_of(ignored_params)
    mesh = default_mesh("replicate") if mesh is None else mesh
    mesh_info = replica_mesh_info_of(mesh, dp_mesh_dims)
    managed = find_managed(modules, ignored)
    cuts = cuts_of(managed, lambda param: None, mesh_info)
    made = Construction(
        modules=modules,
        mesh_info=mesh_info,
        policies=Policies(
            precision=precision, offload=offload, reshard=FixedReshard(forward=False)
        ),
        post_forward={},
        class_of=_replicate_class_of,
    )
    construct(made, managed, cuts)
    return cast(ReplicateModule | list[ReplicateModule], module)


def _replicate_class_of(original: type) -> type:
    return mixed_class_of(ReplicateModule, "Replicate", original)
