"""The norm group: over which ranks a norm is summed, and how often each gradient counts there.

Owns the choice of one process group for gradients on any mix of meshes, and the weight of each. It
computes no norm. [Note: copies] Every rank adds what it holds, so what several ranks hold must be
divided by their number:

- Ranks of one mesh hold copies along the axes on which the ``DTensor`` is replicated.
- Ranks outside a parameter's mesh see the same data (tensor parallelism: the weight of a norm, on
  the ``dp`` slice of a ``(dp, tp)`` mesh) or other data (experts, other ones on each slice). Where
  data differ, gradients that are not reduced together belong to different parameters; so what other
  groups' data parallel ranks hold is not a copy, and what all others hold is.
- A plain tensor is the same on every rank.

All of it follows from the parameters and meshes, never from which gradients a rank has, so that all
ranks choose alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fullshard.sharding.base.compat import spec_of
from fullshard.sharding.mesh.mesh_info import device_of_mesh
from fullshard.sharding.params.owner import owner_of

__all__ = ["NormGroup", "norm_group_of"]

_Ranks = frozenset[int]


@dataclass(frozen=True)
class _Kind:
    """What parameters that are counted alike have in common.

    Attributes:
        mesh: the mesh of the ``DTensor``; None: a plain tensor.
        axes: the axes of the mesh that shard it.
        data: the mesh over which its gradient is reduced; None where ``fully_shard`` does not.
    """

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    data: DeviceMesh | None


_PLAIN = _Kind(None, (), None)


@dataclass(frozen=True)
class NormGroup:
    """Where a norm is summed.

    Attributes:
        process_group: all ranks whose parts make the norm; None: this rank has all of it.
        device: where the sum is made.
        weights: per parameter, one over the number of those ranks that hold the same part.
    """

    process_group: dist.ProcessGroup | None
    device: torch.device
    weights: tuple[float, ...]

    @cached_property
    def by_weight(self) -> dict[float, list[int]]:
        """Per weight, the places of the parameters that have it."""
        found: dict[float, list[int]] = {}
        for place, weight in enumerate(self.weights):
            found.setdefault(weight, []).append(place)
        return found


def norm_group_of(
    params: Sequence[torch.Tensor], process_group: dist.ProcessGroup | None
) -> NormGroup:
    """Returns the group of the norm of the gradients of ``params``.

    Args:
        params: at least one parameter.
        process_group: ranks beyond the parameters' own meshes; None: those meshes.

    Raises:
        ValueError: if ``process_group`` lacks ranks of those meshes.
    """
    kinds = _kinds_of(params)
    distinct = dict.fromkeys({id(kind): kind for kind in kinds}.values())
    meshes = list(dict.fromkeys(kind.mesh for kind in distinct if kind.mesh is not None))
    device = device_of_mesh(meshes[0]) if meshes else params[0].device
    if process_group is None and not meshes:
        return NormGroup(None, device, (1.0,) * len(params))
    axes = {axis for kind in distinct for axis in kind.axes}
    if process_group is None and len(meshes) == 1 and len(axes) <= 1:
        return _along_one_axis(kinds, meshes[0], axes, device)
    reach = _reach(meshes)
    if process_group is None:
        process_group = _process_group_over(reach, meshes)
    else:
        _require_within(reach, process_group)
    data = max(
        (_ranks(kind.data) for kind in distinct if kind.data is not None), key=len, default=_NONE
    )
    weights = {kind: 1 / _copies(kind, data, reach) for kind in distinct}
    return NormGroup(process_group, device, tuple(weights[kind] for kind in kinds))


def _kinds_of(params: Sequence[torch.Tensor]) -> list[_Kind]:
    """Returns the kind of each; parameters that agree in everything share one object."""
    made: dict[tuple[int, tuple[Placement, ...], int], _Kind] = {}
    kinds = []
    for param in params:
        if not isinstance(param, DTensor):
            kinds.append(_PLAIN)
            continue
        owner, spec = owner_of(param), spec_of(param)
        data = None if owner is None else owner.param.mesh_info.mesh
        key = id(spec.mesh), spec.placements, id(data)
        kind = made.get(key)
        if kind is None:
            placed = enumerate(spec.placements)
            axes = tuple([axis for axis, at in placed if not at.is_replicate()])
            kind = made[key] = _Kind(spec.mesh, axes, data)
        kinds.append(kind)
    return kinds


def _along_one_axis(
    kinds: Sequence[_Kind], mesh: DeviceMesh, axes: set[int], device: torch.device
) -> NormGroup:
    """Returns the group where everything lies on one mesh and at most one axis of it shards.

    Replicas have the same gradients and need not be asked.
    """
    if not axes:
        return NormGroup(None, device, (1.0,) * len(kinds))
    (axis,) = axes
    whole = 1 / mesh.size(axis)
    return NormGroup(mesh.get_group(axis), device, tuple(1.0 if k.axes else whole for k in kinds))


_NONE: _Ranks = frozenset()


def _ranks(mesh: DeviceMesh) -> _Ranks:
    return frozenset(mesh.mesh.flatten().tolist())


def _reach(meshes: Sequence[DeviceMesh]) -> _Ranks:
    """Returns the ranks of the mesh that holds all others; all ranks if none does."""
    if not meshes:
        return frozenset((dist.get_rank(),))
    sets = [_ranks(mesh) for mesh in meshes]
    largest = max(sets, key=len)
    if all(ranks <= largest for ranks in sets):
        return largest
    return frozenset(range(dist.get_world_size()))


def _copies(kind: _Kind, data: _Ranks, reach: _Ranks) -> float:
    """Returns how many ranks of ``reach`` hold the same part; see [Note: copies].

    Args:
        kind: what to count.
        data: the ranks that see other data.
        reach: the ranks that are asked.
    """
    if kind.mesh is None:
        return len(reach)
    own = _ranks(kind.mesh)
    replicas = 1
    for axis in range(kind.mesh.ndim):
        replicas *= 1 if axis in kind.axes else kind.mesh.size(axis)
    data = data if kind.data is not None else _NONE
    # Meshes are grids: from own, along data, one comes to this many ranks.
    spanned = len(own) * len(data) / len(own & data) if data else len(own)
    return replicas * len(reach) / spanned


def _require_within(reach: _Ranks, process_group: dist.ProcessGroup) -> None:
    outside = reach - set(dist.get_process_group_ranks(process_group))
    if outside:
        raise ValueError(
            f"process_group lacks ranks {sorted(outside)}, over which the parameters are sharded; "
            "pass a group of all ranks that hold a part of the model, or None"
        )


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Ranks, dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def _process_group_over(ranks: _Ranks, meshes: Sequence[DeviceMesh]) -> dist.ProcessGroup:
    """Returns a process group of ``ranks``; one is made where torch has none, once."""
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    if len(ranks) == dist.get_world_size():
        return world
    for mesh in meshes:
        if mesh.ndim == 1 and _ranks(mesh) == ranks:
            return mesh.get_group()
    known = _made.setdefault(world, {})
    if ranks not in known:
        known[ranks] = dist.new_group(sorted(ranks), use_local_synchronization=True)
    return known[ranks]
