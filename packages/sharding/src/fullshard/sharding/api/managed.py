"""Finds the parameters that a ``fully_shard`` call manages, who holds each, and how each is cut.

Owns the walk over the modules, what a ``shard_placement_fn`` may return, and the checks of both,
all of which come before anything changes. The walk skips modules that are already sharded, but
finds parameters tied to theirs. How a parameter is cut is ``FSDPParam``'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import Shard

from fullshard.sharding.api.module import FSDPModule
from fullshard.sharding.base.torch_objects import converted
from fullshard.sharding.hooks.lookup import state_of
from fullshard.sharding.mesh.mesh_info import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from fullshard.sharding.params.lookup import owner_of
from fullshard.sharding.params.param import Cut, FSDPParam, Place
from fullshard.sharding.params.param_sharding import require_shardable

__all__ = [
    "Managed",
    "ShardPlacementFn",
    "ShardPlacementFnResult",
    "ShardPlacementResult",
    "find_managed",
    "modules_of",
]


@dataclass(frozen=True)
class ShardPlacementResult:
    """A placement on a mesh of its own: what a ``shard_placement_fn`` may return.

    Parameters of one module on different meshes form separate groups: gathered and reduced
    over their own process groups, their gradients divided by the size of their own mesh.

    Attributes:
        placement: ``Shard(dim)``; None: ``Shard(0)``.
        mesh_info: the mesh: an ``FSDPMeshInfo``, ``HSDPMeshInfo`` or ``DDPMeshInfo``.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


ShardPlacementFnResult: TypeAlias = Shard | ShardPlacementResult | None
"""What a ``shard_placement_fn`` may return: a ``Shard(dim)``, one with a mesh, or None."""

ShardPlacementFn: TypeAlias = Callable[[nn.Parameter], ShardPlacementFnResult]
"""A ``shard_placement_fn``."""


@dataclass(frozen=True)
class Managed:
    """The parameters that one call finds.

    Attributes:
        cuts: each parameter to shard, in order of first sight, and how.
        tied: more places of parameters that other groups shard already.
    """

    cuts: dict[nn.Parameter, Cut]
    tied: dict[Place, FSDPParam]


def modules_of(module: object, call: str) -> tuple[nn.Module, ...]:
    """Return the module, or the modules of a list.

    Args:
        module: what was passed.
        call: the name of the function it was passed to.

    Raises:
        TypeError: if it is or holds no module.
        ValueError: if a module comes twice, was sharded or replicated before, or has no forward.
    """
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
                f"call {call} on each module in it, or pass them as a list"
            )
        if isinstance(each, torch.jit.ScriptModule):
            raise ValueError(
                f"module is or holds a {type(each).__name__}, which torch.jit compiled: its "
                f"forward takes no hooks; for a traced module, call {call} on a Python module that "
                "holds it, for a scripted one on the module that was compiled"
            )
        if isinstance(each, FSDPModule) or state_of(each) is not None:
            raise ValueError(
                f"{type(each).__name__} was given to fully_shard or replicate before; call {call} "
                "on a module once"
            )
    if len(set(modules)) < len(modules):
        raise ValueError("module holds the same module twice; pass each once")
    return modules


def find_managed(
    modules: Sequence[nn.Module],
    ignored: object,
    placement: ShardPlacementFn | None,
    mesh_info: FSDPMeshInfo,
) -> Managed:
    """Return the parameters that a call on ``modules`` manages, and how each is to be sharded.

    Args:
        modules: the modules.
        ignored: the user's ``ignored_params``.
        placement: the user's ``shard_placement_fn``.
        mesh_info: the mesh of those parameters for which it names none.

    Raises:
        TypeError: if an argument, or what the function returns, is of the wrong type.
        ValueError: if a parameter cannot be sharded so, or is in the group of a module around
            ``modules``; the message names it.
    """
    if placement is not None and not callable(placement):
        raise TypeError(
            f"shard_placement_fn is a {type(placement).__name__}; pass a function from a parameter "
            "to Shard(dim), a ShardPlacementResult or None"
        )
    skipped = _ids_of(ignored)
    managed, seen = Managed({}, {}), set[nn.Module]()
    for prefix, module in [pair for each in modules for pair in _walk("", each, seen)]:
        for key, param in module._parameters.items():
            if param is None or id(param) in skipped:
                continue
            place = Place(module, key)
            owner = owner_of(param)
            if owner is not None:
                _require_inner_first(modules, prefix + key, owner)
                managed.tied[place] = owner
            elif param in managed.cuts:
                managed.cuts[param].places.append(place)
            else:
                _require_hooks(prefix + key, module)
                require_shardable(prefix + key, param)
                chosen = None if placement is None else placement(param)
                dim, mesh = _dim_and_mesh(prefix + key, param, chosen, mesh_info)
                managed.cuts[param] = Cut(
                    name=prefix + key, places=[place], mesh_info=mesh, dim=dim, walked=seen
                )
    return managed


def _require_inner_first(modules: Sequence[nn.Module], name: str, owner: FSDPParam) -> None:
    """Check that no call on a module around ``modules`` took their parameter ``name``.

    Raises:
        ValueError: if one did: a call on ``modules`` would then change nothing.
    """
    for each in modules:
        if each in owner.walked:
            raise ValueError(
                f"{type(each).__name__} is inside a module that was given to fully_shard or "
                f"replicate before, whose group holds {name} as {owner.name}; call it on inner "
                "modules first, and on the module around them last"
            )


def _require_hooks(name: str, module: nn.Module) -> None:
    """Check that ``module``, which holds the parameter ``name``, takes state dict hooks.

    Raises:
        ValueError: if ``torch.jit.script`` compiled it.
    """
    if isinstance(module, torch.jit.RecursiveScriptModule):
        raise ValueError(
            f"{name} belongs to a module that torch.jit.script compiled or torch.jit.load read, "
            "which takes no state dict hooks; shard the Python module instead, make it by "
            "torch.jit.trace, or pass its parameters as ignored_params"
        )


def _ids_of(ignored: object) -> set[int]:
    if not isinstance(ignored, set | frozenset | None):
        raise TypeError(
            f"ignored_params is a {type(ignored).__name__}; pass a set of nn.Parameter, or None"
        )
    for each in ignored or ():
        if not isinstance(each, nn.Parameter):
            raise TypeError(
                f"ignored_params holds a {type(each).__name__}; pass a set of nn.Parameter, or None"
            )
    return {id(each) for each in ignored or ()}


def _walk(prefix: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module from ``module`` on once, except sharded modules and their children."""
    if module in seen or state_of(module) is not None:
        return
    seen.add(module)
    yield prefix, module
    for name, child in module.named_children():
        yield from _walk(f"{prefix}{name}.", child, seen)


def _dim_and_mesh(
    name: str, param: nn.Parameter, chosen: ShardPlacementFnResult, mesh_info: FSDPMeshInfo
) -> tuple[int, FSDPMeshInfo]:
    """Return how to cut ``param``, given the result ``chosen`` of ``shard_placement_fn``."""
    chosen = converted(chosen, {"ShardPlacementResult": ShardPlacementResult})
    if isinstance(chosen, ShardPlacementResult):
        mesh_info = _require_mesh_info(name, chosen.mesh_info, mesh_info)
        chosen = chosen.placement
    if chosen is None:
        return 0, mesh_info
    if not isinstance(chosen, Shard):
        raise TypeError(
            f"shard_placement_fn returned a {type(chosen).__name__} for {name}; return Shard(dim), "
            "a ShardPlacementResult or None"
        )
    dim = chosen.dim + param.ndim if chosen.dim < 0 else chosen.dim
    if not 0 <= dim < param.ndim:
        raise ValueError(
            f"shard_placement_fn returned {chosen} for {name}, which has {param.ndim} dimensions"
        )
    return dim, mesh_info


_TORCHS = {each.__name__: each for each in (FSDPMeshInfo, HSDPMeshInfo, DDPMeshInfo)}


def _require_mesh_info(name: str, value: object, default: FSDPMeshInfo) -> FSDPMeshInfo:
    value = converted(value, _TORCHS)
    if not isinstance(value, FSDPMeshInfo):
        raise TypeError(
            f"shard_placement_fn returned a ShardPlacementResult with mesh_info "
            f"{type(value).__module__}.{type(value).__name__} for {name}; pass an FSDPMeshInfo, "
            "HSDPMeshInfo or DDPMeshInfo of fullshard.sharding"
        )
    if value.mesh.device_type != default.mesh.device_type:
        raise ValueError(
            f"shard_placement_fn put {name} on a mesh of {value.mesh.device_type} devices, but its "
            f"module computes on {default.mesh.device_type}; pass meshes of one device type"
        )
    if value.mesh.get_coordinate() is None:
        raise ValueError(
            f"shard_placement_fn put {name} on mesh {value.mesh}, in which this rank is not; pass "
            "the mesh that this rank belongs to, for example a slice of one mesh of all ranks"
        )
    return value
