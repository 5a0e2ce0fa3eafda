"""``fully_shard`` shards parameters, gradients and optimizer state; ``replicate`` replicates them.

Owns the public functions and the order of their checks, which all come before anything changes, so
a call that raises leaves the module as it was. No call communicates, but one that keeps shards over
a post-forward mesh, shards over several axes of a mesh, or replicates, makes process groups.
"""

from __future__ import annotations

from typing import TypedDict, TypeVar, Unpack, cast, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding.api.construction import construct
from fullshard.sharding.api.managed import ShardPlacementFn, find_managed, modules_of
from fullshard.sharding.api.module import FSDPModule
from fullshard.sharding.base.policies import FullPrecision, Policies, require
from fullshard.sharding.mesh.mesh_axes import default_mesh, mesh_info_of, require_mesh
from fullshard.sharding.mesh.mesh_info import DataParallelMeshDims, FSDPMeshInfo
from fullshard.sharding.mesh.placements import Placed, ShardingPlacements
from fullshard.sharding.protocols import (
    FixedReshard,
    FullWidth,
    NoOffload,
    Offload,
    PrecisionPolicy,
    PrefetchPolicy,
    ReshardPolicy,
    ReverseOrderPrefetch,
    WireForms,
)

__all__ = ["ReplicateModule", "fully_shard", "replicate"]

_M = TypeVar("_M", bound=nn.Module)


class ReplicateOptions(TypedDict, total=False):
    """The keyword arguments of ``replicate``, for type checkers."""

    mesh: DeviceMesh | None
    mp_policy: PrecisionPolicy
    offload_policy: Offload
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None


class ShardingOptions(ReplicateOptions, total=False):
    """The keyword arguments of ``fully_shard``, for type checkers."""

    reshard_after_forward: bool | int | ReshardPolicy | None
    shard_placement_fn: ShardPlacementFn | None
    prefetch_policy: PrefetchPolicy
    wire_policy: WireForms
    placements: ShardingPlacements | None


@overload
def fully_shard(module: nn.Module, **options: Unpack[ShardingOptions]) -> FSDPModule: ...


@overload
def fully_shard(module: list[_M], **options: Unpack[ShardingOptions]) -> list[FSDPModule]: ...


def fully_shard(  # the names, order and defaults are torch's; what is ours comes last
    module: nn.Module | list[_M],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | ReshardPolicy | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: PrecisionPolicy = FullPrecision(),  # noqa: B008  # frozen
    offload_policy: Offload = NoOffload(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    prefetch_policy: PrefetchPolicy = ReverseOrderPrefetch(),  # noqa: B008  # frozen
    wire_policy: WireForms = FullWidth(),  # noqa: B008  # frozen
    placements: ShardingPlacements | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Return ``module``, whose parameters are now sharded over the ranks of ``mesh``.

    The parameters of ``module`` that no earlier call took form one group: gathered together just
    before its forward and its backward, freed after each, their gradients reduced together. Call it
    on the inner modules first, and on the whole model last. Outside forward and backward a
    parameter is a ``DTensor``, cut on dim 0 (``Shard(0)``), of which each rank stores
    ``1 / world_size``; inside, it is a plain tensor like the original one. The optimizer is built
    after the calls and sees the shards only.

    Args:
        module: the module, or a list of modules that form one group.
        mesh: a 1-D mesh; a 2-D one replicates over its first axis and shards over its second; None:
            all ranks.
        reshard_after_forward: free the full parameters after forward and gather them again in
            backward (True), keep them until backward (False), or keep only the root's (None); an
            int keeps shards over that many neighbouring ranks until backward, which gathers over
            those only (1 is False, the number of ranks that shard is True); or a policy.
        shard_placement_fn: returns ``Shard(dim)`` for a parameter, with the dim to cut, or a
            ``ShardPlacementResult``, which also has a mesh; None: ``Shard(0)`` over ``mesh``.
        mp_policy: a ``fullshard.policies.MixedPrecisionPolicy``, or any ``PrecisionPolicy``.
        offload_policy: where shards and gradients live; any ``Offload``.
        ignored_params: parameters that stay as they are: not sharded, not moved, not reduced.
        dp_mesh_dims: which axes of a larger ``mesh`` shard and replicate, several of either acting
            as one. With none that shards, parameters are replicated and stay unsharded from
            forward to backward.
        prefetch_policy: what is gathered ahead; the default is torch's.
        wire_policy: a ``fullshard.wire.WirePolicy``: in what form shards and gradients travel.
        placements: over which axes of ``mesh`` parameters, waiting gradients and optimizer state
            are sharded: ZeRO-1, 2, 3 and forms between; None: all three over the sharding axis.

    Returns:
        The same object, now also an ``FSDPModule``.

    Raises:
        TypeError: if an argument is of the wrong type; the message names it and what to pass.
        ValueError: if a module, or one around it, was sharded before, if a module is given twice,
            if the mesh has other dimensions, or a parameter cannot be sharded.
        RuntimeError: if ``mesh`` is None and ``torch.distributed`` was not initialised.
    """
    modules = modules_of(module, "fully_shard")
    placed = _placed(placements, mesh, dp_mesh_dims, reshard_after_forward)
    mesh_info = placed.mesh_info
    policies = Policies(
        precision=require(PrecisionPolicy, mp_policy, "mp_policy"),
        offload=require(Offload, offload_policy, "offload_policy"),
        reshard=_reshard_policy_of(reshard_after_forward, mesh_info),
        prefetch=require(PrefetchPolicy, prefetch_policy, "prefetch_policy"),
        wire=require(WireForms, wire_policy, "wire_policy"),
    )
    managed = find_managed(modules, ignored_params, shard_placement_fn, mesh_info)
    for each in (mesh_info, *(cut.mesh_info for cut in managed.cuts.values())):
        placed.require_divides(each)
    construct(modules, managed, placed, policies, FSDPModule)
    return cast(FSDPModule | list[FSDPModule], module)


def _placed(
    placements: object, mesh: DeviceMesh | None, dims: object, reshard_after_forward: object
) -> Placed:
    """Return what ``placements`` mean on ``mesh``; what the other arguments mean without any."""
    ranks = reshard_after_forward if type(reshard_after_forward) is int else None
    if placements is None:
        mesh_info = mesh_info_of(mesh, cast(DataParallelMeshDims | None, dims))
        return Placed(mesh_info, backward_ranks=ranks)
    if not isinstance(placements, ShardingPlacements):
        raise TypeError(
            f"placements is a {type(placements).__name__}; pass a ShardingPlacements of "
            "fullshard.sharding, or None"
        )
    if dims is not None:
        raise ValueError(
            "placements and dp_mesh_dims both name axes; pass one of them, placements with a mesh "
            "of data parallel axes only, for example mesh['outer', 'inner']"
        )
    placed = placements.on(require_mesh(mesh or default_mesh(None)))
    if ranks is not None:
        raise ValueError(
            f"reshard_after_forward is {ranks}, and placements= says where parameters are between "
            "their uses; pass one of them"
        )
    return placed


def _reshard_policy_of(value: object, mesh_info: FSDPMeshInfo) -> ReshardPolicy:
    """Return the policy that ``reshard_after_forward`` stands for.

    On a mesh that only replicates it is torch's: there is nothing to gather again, so parameters
    stay unsharded until backward, unless ``value`` is a policy.
    """
    if not isinstance(value, int | None):
        return require(ReshardPolicy, value, "reshard_after_forward")
    if mesh_info.shard_mesh_dim is None:
        return FixedReshard(forward=False)
    return FixedReshard(forward=value if isinstance(value, bool | None) else value != 1)


class ReplicateModule(FSDPModule):
    """A module whose parameters are replicated. Made by ``replicate``, never constructed.

    Has every method of ``FSDPModule``: gradient accumulation, state dicts and the like are the
    same.
    """


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
    """Return ``module``, whose parameters every rank of ``mesh`` has whole.

    Replication uses the engine of ``fully_shard``, as hybrid sharding in which each rank shards
    alone. The parameters of ``module`` that no earlier call took form one group. A single
    all-reduce averages their gradients over the ranks during backward. Call it on the inner modules
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
        ValueError: if a module, or one around it, was sharded or replicated before, if a module is
            given twice, if the mesh has other dimensions, ``dp_mesh_dims`` names an axis that
            shards, or a parameter cannot be taken.
        RuntimeError: if ``mesh`` is None and ``torch.distributed`` was not initialised.
    """
    modules = modules_of(module, "replicate")
    mesh_info = mesh_info_of(mesh, dp_mesh_dims, replicated=True)
    policies = Policies(
        precision=require(PrecisionPolicy, mp_policy, "mp_policy"),
        offload=require(Offload, offload_policy, "offload_policy"),
        reshard=FixedReshard(forward=False),
        prefetch=ReverseOrderPrefetch(),
        wire=FullWidth(),
    )
    managed = find_managed(modules, ignored_params, None, mesh_info)
    construct(modules, managed, Placed(mesh_info), policies, ReplicateModule)
    return cast(ReplicateModule | list[ReplicateModule], module)
