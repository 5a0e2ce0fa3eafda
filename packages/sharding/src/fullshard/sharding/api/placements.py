"""Where each parameter is cut, and over which mesh: the answers of ``shard_placement_fn``.

Owns what the function may return and the checks of it. All checks come before anything changes. How
a parameter is cut is ``FSDPParam``'s affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn
from torch.distributed.tensor import Shard

from fullshard.sharding.api.managed import Managed
from fullshard.sharding.base.torch_objects import converted
from fullshard.sharding.mesh.mesh_info import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from fullshard.sharding.params.sources import require_shardable

__all__ = ["Cut", "ShardPlacementFnResult", "ShardPlacementResult", "cuts_of"]


@dataclass(frozen=True)
class ShardPlacementResult:
    """A placement on a mesh of its own: what a ``shard_placement_fn`` may return.

    Parameters of one module on different meshes form groups of their own: gathered and reduced
    over their own process groups, their gradients divided by the size of their own mesh.

    Attributes:
        placement: ``Shard(dim)``; None: ``Shard(0)``.
        mesh_info: the mesh: an ``FSDPMeshInfo``, ``HSDPMeshInfo`` or ``DDPMeshInfo``.
    """

    placement: Shard | None
    mesh_info: FSDPMeshInfo


ShardPlacementFnResult: TypeAlias = Shard | ShardPlacementResult | None
"""What a ``shard_placement_fn`` may return: a ``Shard(dim)``, one with a mesh, or None."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is sharded.

    Attributes:
        mesh_info: over which mesh.
        dim: along which dim, counted from the first.
    """

    mesh_info: FSDPMeshInfo
    dim: int


def cuts_of(
    managed: Managed,
    placement: Callable[[nn.Parameter], ShardPlacementFnResult],
    default: FSDPMeshInfo,
) -> list[Cut]:
    """Returns how each parameter is sharded, in the order of ``managed.places``.

    Args:
        managed: the parameters.
        placement: the user's function.
        default: the mesh of those for which it names none.

    Raises:
        TypeError: if the function returns something else.
        ValueError: if a parameter cannot be sharded so; the message names it.
    """
    cuts = []
    for param in managed.places:
        name = managed.names[param]
        require_shardable(name, param)
        cuts.append(_cut_of(name, param, placement(param), default))
    return cuts


def _cut_of(
    name: str, param: nn.Parameter, chosen: ShardPlacementFnResult, default: FSDPMeshInfo
) -> Cut:
    mesh_info = default
    chosen = converted(chosen, {"ShardPlacementResult": ShardPlacementResult})
    if isinstance(chosen, ShardPlacementResult):
        mesh_info = _require_mesh_info(name, chosen.mesh_info, default)
        chosen = chosen.placement
    if chosen is None:
        return Cut(mesh_info, 0)
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
    return Cut(mesh_info, dim)


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
