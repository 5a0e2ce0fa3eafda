"""``fully_shard``: shard a module's parameters, gradients and optimizer state over all ranks.

Owns the checks of its arguments and the making of a group. All checks come before anything
changes, so a call that raises leaves the module as it was. No call communicates, but one that
reshards to a smaller world makes process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.sharding.context import RootContext
from fullshard.sharding.gathering import GroupPolicies
from fullshard.sharding.generation import watch_optimizers
from fullshard.sharding.initialise import initialise_root
from fullshard.sharding.mesh import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    default_mesh,
    device_of_mesh,
    mesh_info_of,
)
from fullshard.sharding.module import FSDPModule, fsdp_class_of
from fullshard.sharding.module_state import (
    ModuleHome,
    ModulePolicies,
    ModuleState,
    state_of,
)
from fullshard.sharding.param import FSDPParam
from fullshard.sharding.param_group import FSDPParamGroup
from fullshard.sharding.places import Managed, Owner, find_managed, set_owner
from fullshard.sharding.protocols import (
    FixedReshard,
    FullPrecision,
    NoStaging,
    PrecisionPolicy,
    PrefetchPolicy,
    ReshardPolicy,
    ReverseOrderPrefetch,
    Staging,
    require,
)
from fullshard.sharding.smaller_world import require_divisor, smaller_mesh_info
from fullshard.sharding.sources import require_shardable
from fullshard.sharding.state_dict import attach_state_dict_hooks

__all__ = ["fully_shard"]

_M = TypeVar("_M", bound=nn.Module | Sequence[nn.Module])
_Placement = Callable[[nn.Parameter], Shard | None]


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """The arguments of one call, checked."""

    modules: tuple[nn.Module, ...]
    mesh_info: FSDPMeshInfo
    device: torch.device
    precision: PrecisionPolicy
    staging: Staging
    reshard: ReshardPolicy
    smaller: FSDPMeshInfo | None
    prefetch: PrefetchPolicy
    ignored: frozenset[nn.Parameter]
    placement: _Placement


def fully_shard(  # the names, order and defaults are torch's; what is ours comes last
    module: _M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | ReshardPolicy | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: PrecisionPolicy = FullPrecision(),  # noqa: B008  # frozen
    offload_policy: Staging = NoStaging(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    prefetch_policy: PrefetchPolicy = ReverseOrderPrefetch(),  # noqa: B008  # frozen
) -> _M:
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
        shard_placement_fn: returns, for a parameter, the ``Shard(dim)`` to cut it along; None:
            ``Shard(0)``.
        mp_policy: a ``fullshard.policies.MixedPrecisionPolicy``, or any ``PrecisionPolicy``.
        offload_policy: where shards and gradients live; any ``Staging``.
        ignored_params: parameters that stay as they are: not sharded, not moved, not reduced.
        dp_mesh_dims: which axes of a larger ``mesh`` shard and replicate.
        prefetch_policy: what is gathered ahead; the default is torch's.

    Returns:
        The same object, now also an ``FSDPModule``.

    Raises:
        TypeError: if an argument is of the wrong type; the message names it and what to pass.
        ValueError: if a module was sharded before or is given twice, if the mesh has other
            dimensions, or a parameter cannot be sharded.
        RuntimeError: if ``mesh`` is None and ``torch.distributed`` was not initialised.
    """
    modules = _modules_of(module)
    precision = require(PrecisionPolicy, mp_policy, "mp_policy")
    staging = require(Staging, offload_policy, "offload_policy")
    prefetch = require(PrefetchPolicy, prefetch_policy, "prefetch_policy")
    reshard = _reshard_policy(reshard_after_forward)
    ignored = _ignored_of(ignored_params)
    placement = _placement_of(shard_placement_fn)
    mesh_info = mesh_info_of(default_mesh() if mesh is None else mesh, dp_mesh_dims)
    arguments = _Arguments(
        modules=modules,
        mesh_info=mesh_info,
        device=device_of_mesh(mesh_info.mesh),
        precision=precision,
        staging=staging,
        reshard=reshard,
        smaller=None,
        prefetch=prefetch,
        ignored=ignored,
        placement=placement,
    )
    managed = find_managed(modules, ignored)
    dims = _check_parameters(managed, placement)
    smaller = _smaller_of(reshard_after_forward, mesh_info)  # makes process groups
    _apply(replace(arguments, smaller=smaller), managed, dims)
    return module


def _apply(arguments: _Arguments, managed: Managed, dims: Sequence[int]) -> None:
    watch_optimizers()
    context = RootContext(arguments.device)
    groups = [_make_group(arguments, managed, dims, context)] if managed.places else []
    _move_buffers(arguments)
    for owner, place in managed.tied:
        if place not in owner.param.places:
            owner.param.add_place(place)
            attach_state_dict_hooks(owner.group, [place.module])
    for group in groups:
        group.reshard_to(arguments.smaller)
    state = ModuleState(
        arguments.modules,
        groups,
        [owner.group for owner, _ in managed.tied],
        ModuleHome(mesh_info=arguments.mesh_info, device=arguments.device, context=context),
        ModulePolicies(
            casts=arguments.precision, reshard=arguments.reshard, prefetch=arguments.prefetch
        ),
    )
    state.attach(initialise_root)
    for module in arguments.modules:
        module.__class__ = fsdp_class_of(type(module))


def _make_group(
    arguments: _Arguments, managed: Managed, dims: Sequence[int], context: RootContext
) -> FSDPParamGroup:
    home = arguments.staging.home(arguments.device)
    originals = list(managed.places)
    params = []
    for original, dim in zip(originals, dims, strict=True):
        source = original if original.device.type in ("meta", home.type) else _moved(original, home)
        params.append(
            FSDPParam(
                source,
                managed.places[original],
                arguments.mesh_info,
                dim,
                arguments.staging,
                managed.names[original],
            )
        )
    group = FSDPParamGroup(
        params,
        arguments.mesh_info,
        arguments.device,
        GroupPolicies(dtypes=arguments.precision, staging=arguments.staging),
        context.shared,
    )
    # Nothing raises from here on: until now the modules are as they were.
    for original, param in zip(originals, params, strict=True):
        param.to_sharded()
        set_owner(original, Owner(param, group))
        set_owner(param.sharded, Owner(param, group))
    attach_state_dict_hooks(group, {place.module for param in params for place in param.places})
    return group


def _moved(original: nn.Parameter, home: torch.device) -> nn.Parameter:
    moved = nn.Parameter(original.detach().to(home), requires_grad=original.requires_grad)
    moved.__dict__.update(original.__dict__)
    return moved


def _move_buffers(arguments: _Arguments) -> None:
    """Moves buffers to where the model computes, as torch's own does; meta ones stay."""
    for module in arguments.modules:
        for sub in module.modules():
            for name, buffer in sub._buffers.items():
                if buffer is not None and buffer.device.type not in ("meta", arguments.device.type):
                    sub._buffers[name] = buffer.to(arguments.device)


# -- checks ---------------------------------------------------------------------------------------


def _modules_of(module: object) -> tuple[nn.Module, ...]:
    modules = tuple(module) if isinstance(module, (list, tuple)) else (module,)
    if not modules:
        raise ValueError("module is an empty list; pass at least one module")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(
                f"module is or holds a {type(each).__name__}; pass an nn.Module or a list of them"
            )
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward in (
            nn.ModuleList.forward,
            nn.ModuleDict.forward,
        ):
            raise ValueError(
                f"{type(each).__name__} has no forward, so its parameters would never be gathered; "
                "call fully_shard on each module in it, or pass them as a list"
            )
        if isinstance(each, FSDPModule) or state_of(each) is not None:
            raise ValueError(f"{type(each).__name__} was given to fully_shard before")
    if len(set(modules)) < len(modules):
        raise ValueError("module holds the same module twice; pass each once")
    return modules


def _reshard_policy(value: object) -> ReshardPolicy:
    if value is None or isinstance(value, bool):
        return FixedReshard(forward=value)
    if isinstance(value, int):
        return FixedReshard(forward=value != 1)
    return require(ReshardPolicy, value, "reshard_after_forward")


def _smaller_of(value: object, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """Returns the smaller world that an int asks for."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    require_divisor(value, mesh_info)
    if value in (1, mesh_info.shard_world_size):
        return None
    return smaller_mesh_info(mesh_info, value)


def _ignored_of(value: object) -> frozenset[nn.Parameter]:
    if value is None:
        return frozenset()
    if not isinstance(value, (set, frozenset)):
        raise TypeError(
            f"ignored_params is a {type(value).__name__}; pass a set of nn.Parameter, or None"
        )
    for each in value:
        if not isinstance(each, nn.Parameter):
            raise TypeError(
                f"ignored_params holds a {type(each).__name__}; pass a set of nn.Parameter, or None"
            )
    return frozenset(value)


def _placement_of(value: object) -> _Placement:
    if value is None:
        return lambda param: None
    if not callable(value):
        raise TypeError(
            f"shard_placement_fn is a {type(value).__name__}; pass a function from a parameter to "
            "Shard(dim) or None"
        )
    return value


def _check_parameters(managed: Managed, placement: _Placement) -> list[int]:
    """Returns the dim to cut each parameter along."""
    dims = []
    for param in managed.places:
        name = managed.names[param]
        require_shardable(name, param)
        dims.append(_dim_of(name, param, placement(param)))
    return dims


def _dim_of(name: str, param: nn.Parameter, chosen: Shard | None) -> int:
    if chosen is None:
        return 0
    if not isinstance(chosen, Shard):
        raise TypeError(
            f"shard_placement_fn returned a {type(chosen).__name__} for {name}; return Shard(dim) "
            "or None"
        )
    dim = chosen.dim + param.ndim if chosen.dim < 0 else chosen.dim
    if not 0 <= dim < param.ndim:
        raise ValueError(
            f"shard_placement_fn returned {chosen} for {name}, which has {param.ndim} dimensions"
        )
    return dim
