"""``fully_shard``: shard a module's parameters, gradients and optimizer state over all ranks.

Owns the public function and the order of its checks, which all come before anything changes, so a
call that raises leaves the module as it was. No call communicates, but one that reshards to a
post-forward mesh, or shards over several axes of a mesh, makes process groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, TypeVar, Unpack, cast, overload

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding.api.arguments import ignored_of, modules_of, placement_of, reshard_policy_of
from fullshard.sharding.api.construction import Construction, construct
from fullshard.sharding.api.managed import find_managed
from fullshard.sharding.api.module import FSDPModule, fsdp_class_of
from fullshard.sharding.api.placements import ShardPlacementFnResult, cuts_of
from fullshard.sharding.base.required import require
from fullshard.sharding.mesh.mesh_axes import default_mesh, mesh_info_of
from fullshard.sharding.mesh.mesh_info import DataParallelMeshDims
from fullshard.sharding.mesh.post_forward_mesh import post_forward_meshes
from fullshard.sharding.protocols import (
    FullPrecision,
    NoOffload,
    Offload,
    Policies,
    PrecisionPolicy,
    PrefetchPolicy,
    ReshardPolicy,
    ReverseOrderPrefetch,
)

__all__ = ["fully_shard"]

_M = TypeVar("_M", bound=nn.Module)


class ShardingOptions(TypedDict, total=False):
    """The keyword arguments of ``fully_shard``, for type checkers."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | ReshardPolicy | None
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None
    mp_policy: PrecisionPolicy
    offload_policy: Offload
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    prefetch_policy: PrefetchPolicy


@overload
def fully_shard(module: nn.Module, **options: Unpack[ShardingOptions]) -> FSDPModule: ...


@overload
def fully_shard(module: list[_M], **options: Unpack[ShardingOptions]) -> list[FSDPModule]: ...


def fully_shard(  # the names, order and defaults are torch's; what is ours comes last
    module: nn.Module | list[_M],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | ReshardPolicy | None = None,
    shard_placement_fn: Callable[[nn.Parameter], ShardPlacementFnResult] | None = None,
    mp_policy: PrecisionPolicy = FullPrecision(),  # noqa: B008  # frozen
    offload_policy: Offload = NoOffload(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    prefetch_policy: PrefetchPolicy = ReverseOrderPrefetch(),  # noqa: B008  # frozen
) -> FSDPModule | list[FSDPModule]:
    """Returns ``module``, whose parameters are now sharded over the ranks of ``mesh``.

    The parameters of ``module`` that no earlier call took form one group: gathered together just
    before its forward and its backward, freed after each, their gradients reduced together. So
    call it on the inner modules first, and on the whole model last. Outside forward and backward a
    parameter is a ``DTensor`` of which each rank stores ``1 / world_size``, cut along
    ``Shard(0)``; inside, it is a plain tensor like the original one. The optimizer is built after
    the calls and sees the shards only.

    Args:
        module: the module, or a list of modules that form one group.
        mesh: a 1-D mesh; a 2-D one replicates over its first axis and shards over its second; None:
            all ranks.
        reshard_after_forward: free the full parameters after forward and gather them again in
            backward (True), keep them until backward (False), or keep only the root's (None); an
            int keeps shards over that many neighbouring ranks until backward, which gathers over
            those only (1 is False, the number of ranks that shard is True); or a policy.
        shard_placement_fn: returns, for a parameter, the ``Shard(dim)`` to cut it along, or a
            ``ShardPlacementResult``, which also has a mesh of its own; None: ``Shard(0)`` over
            ``mesh``.
        mp_policy: a ``fullshard.policies.MixedPrecisionPolicy``, or any ``PrecisionPolicy``.
        offload_policy: where shards and gradients live; any ``Offload``.
        ignored_params: parameters that stay as they are: not sharded, not moved, not reduced.
        dp_mesh_dims: which axes of a larger ``mesh`` shard and replicate, several of either acting
            as one. With none that shards, parameters are replicated and stay unsharded from
            forward to backward.
        prefetch_policy: what is gathered ahead; the default is torch's.

    Returns:
        The same object, now also an ``FSDPModule``.

    Raises:
        TypeError: if an argument is of the wrong type; the message names it and what to pass.
        ValueError: if a module was sharded before or is given twice, if the mesh has other
            dimensions, or a parameter cannot be sharded.
        RuntimeError: if ``mesh`` is None and ``torch.distributed`` was not initialised.
    """
    modules = modules_of(module, "fully_shard")
    precision = require(PrecisionPolicy, mp_policy, "mp_policy")
    offload = require(Offload, offload_policy, "offload_policy")
    prefetch = require(PrefetchPolicy, prefetch_policy, "prefetch_policy")
    ignored = ignored_of(ignored_params)
    placement = placement_of(shard_placement_fn)
    mesh_info = mesh_info_of(default_mesh() if mesh is None else mesh, dp_mesh_dims)
    reshard = reshard_policy_of(reshard_after_forward, mesh_info)
    managed = find_managed(modules, ignored)
    cuts = cuts_of(managed, placement, mesh_info)
    meshes = [cut.mesh_info for cut in cuts]
    made = Construction(
        modules=modules,
        mesh_info=mesh_info,
        policies=Policies(precision=precision, offload=offload, reshard=reshard, prefetch=prefetch),
        post_forward=post_forward_meshes(reshard_after_forward, mesh_info, meshes),
        class_of=fsdp_class_of,
    )
    construct(made, managed, cuts)
    return cast(FSDPModule | list[FSDPModule], module)
