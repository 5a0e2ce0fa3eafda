"""The arguments of ``fully_shard`` and ``replicate``, checked.

Owns the checks that need one argument only. Each says what came, what is allowed and what to do;
none changes anything.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fullshard.sharding.api.module import FSDPModule
from fullshard.sharding.api.placements import ShardPlacementFnResult
from fullshard.sharding.base.required import require
from fullshard.sharding.hooks.lookup import state_of
from fullshard.sharding.mesh.mesh_info import FSDPMeshInfo
from fullshard.sharding.protocols import FixedReshard, ReshardPolicy

__all__ = ["ignored_of", "modules_of", "placement_of", "reshard_policy_of"]


def modules_of(module: object, call: str) -> tuple[nn.Module, ...]:
    """Returns the module, or the modules of a list.

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
        if isinstance(each, FSDPModule) or state_of(each) is not None:
            raise ValueError(
                f"{type(each).__name__} was given to fully_shard or replicate before; call {call} "
                "on a module once"
            )
    if len(set(modules)) < len(modules):
        raise ValueError("module holds the same module twice; pass each once")
    return modules


def reshard_policy_of(value: object, mesh_info: FSDPMeshInfo) -> ReshardPolicy:
    """Returns the policy that ``reshard_after_forward`` stands for.

    On a mesh that only replicates it is torch's: there is nothing to gather again, so parameters
    stay unsharded until backward, unless ``value`` is a policy.

    Raises:
        TypeError: if it stands for none.
    """
    if value is None or isinstance(value, int):
        if mesh_info.shard_mesh_dim is None:
            return FixedReshard(forward=False)
        return FixedReshard(forward=value if isinstance(value, bool | None) else value != 1)
    return require(ReshardPolicy, value, "reshard_after_forward")


def ignored_of(value: object) -> frozenset[nn.Parameter]:
    """Returns the ``ignored_params``; none for None.

    Raises:
        TypeError: if it is not a set of parameters.
    """
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


def placement_of(value: object) -> Callable[[nn.Parameter], ShardPlacementFnResult]:
    """Returns the ``shard_placement_fn``; for None, one that returns None.

    Raises:
        TypeError: if it cannot be called.
    """
    if value is None:
        return lambda param: None
    if not callable(value):
        raise TypeError(
            f"shard_placement_fn is a {type(value).__name__}; pass a function from a parameter to "
            "Shard(dim), a ShardPlacementResult or None"
        )
    return value
