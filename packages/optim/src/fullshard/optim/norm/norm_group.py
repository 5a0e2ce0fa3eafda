"""The norm group: whose gradients make a norm, over which ranks, and how often each counts there.

Owns the walk from a user's arguments to the optimizer's parameters, the choice of a process group
for any mix of meshes, and the weights. Gradients are not read here.

[Note: copies]
Every rank adds what it holds, so what several ranks hold must be divided by their number:

- The ranks of a mesh hold copies on the axes on which the ``DTensor`` is replicated.
- Ranks outside a parameter's mesh see the same data (tensor parallelism: the weight of a norm, on
  the ``dp`` slice of a ``(dp, tp)`` mesh) or other data (experts, other ones on each slice). Where
  data differ, gradients that are not reduced together belong to different parameters; so what other
  groups' data parallel ranks hold is not a copy, and what all others hold is.
- A plain tensor is the same on every rank.

The choice depends on parameters and meshes only, not on the gradients of a rank, so that all ranks
choose alike. The result is kept until a different norm is requested, because most steps request an
equal one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.optim.steps.gradient_stores import gradient_stores_of
from fullshard.sharding.spi import (
    Snapshot,
    are_same,
    device_of_mesh,
    known_subgroup,
    local_shards,
    owner_of,
    sharded_of,
    spec_of,
    specs_of,
)

__all__ = ["NormGroup", "Parameters", "norm_group_of"]

Parameters = nn.Module | torch.Tensor | Iterable[torch.Tensor]

_NOTE = "norm group"  # of the last norm that began with a parameter
_DOUBLE = frozenset({torch.float64, torch.complex128})
_Ranks = frozenset[int]
_NONE: _Ranks = frozenset()


class _Sharding(NamedTuple):
    """What parameters that are counted alike have in common.

    Attributes:
        mesh: the mesh of the ``DTensor``; None: a plain tensor.
        axes: the axes of the mesh that shard it.
        data: the mesh over which its gradient is reduced; None where ``fully_shard`` does not.
    """

    mesh: DeviceMesh | None
    axes: tuple[int, ...]
    data: DeviceMesh | None


_PLAIN = _Sharding(None, (), None)


class NormGroup:
    """The parameters of a norm, and where it is summed.

    Attributes:
        params: those that the optimizer sees, each once; none make a norm of 0.
        process_group: all ranks whose parts make the norm; None: this rank has all of it.
        device: where the sum is made.
        stores: the policies that store gradients, by the indices of their parameters.
        stored: the owners of these parameters.
        by_weight: the indices of parameters that count alike, by weight: one divided by the number
            of ranks that hold this part.
    """

    def __init__(self, given: Sequence[Any], asked: dist.ProcessGroup | None) -> None:
        """Analyse ``given``; ``asked``: all ranks, or None for the ranks of the parameters' meshes.

        Raises:
            TypeError: if something in ``given`` is no tensor.
            ValueError: if ``asked`` lacks ranks of the parameters' meshes.
        """
        self._given = given
        self._asked = asked
        self.params: Sequence[torch.Tensor] = _seen_by_optimizers(given)
        self._specs = specs_of(self.params)
        owners = [owner for owner in map(owner_of, self.params) if owner is not None]
        self.stores = gradient_stores_of(self.params)
        self.stored = owners if self.stores else []
        self._snapshot = Snapshot([owner.generation for owner in owners])
        self._all_cut = all(isinstance(param, DTensor) for param in self.params)
        alike: dict[_Sharding, list[int]] = {}
        for place, param in enumerate(self.params):
            alike.setdefault(_sharding_of(param), []).append(place)
        meshes = list(dict.fromkeys(each.mesh for each in alike if each.mesh is not None))
        here = self.params[0].device if self.params else torch.device("cpu")
        self.device = device_of_mesh(meshes[0]) if meshes else here
        self.process_group = asked
        self.by_weight: dict[float, list[int]] = {}
        for sharding, weight in self._weights(alike, meshes).items():
            self.by_weight.setdefault(weight, []).extend(alike[sharding])

    def is_of(self, given: Sequence[Any], asked: dist.ProcessGroup | None) -> bool:
        """Return whether ``given`` and ``asked`` would make an equal norm group."""
        return (
            asked is self._asked
            and self._snapshot.is_current
            and are_same(given, self._given)
            and are_same(specs_of(self.params), self._specs)
        )

    def are_cut_alike(self, gradients: Sequence[object]) -> bool:
        """Return whether each parameter has a gradient with the parameter's own spec."""
        return self._all_cut and are_same(specs_of(gradients), self._specs)

    @property
    def double(self) -> bool:
        """Whether any parameter is of 64 bits per number."""
        params: Sequence[Any] = self.params
        if self._all_cut:
            params = local_shards(params)  # torch is slow to tell a DTensor's dtype
        return not _DOUBLE.isdisjoint([each.dtype for each in params])

    def _weights(
        self, shardings: Iterable[_Sharding], meshes: Sequence[DeviceMesh]
    ) -> dict[_Sharding, float]:
        """Choose the process group, and return the weight of each sharding there."""
        axes = {axis for sharding in shardings for axis in sharding.axes}
        if self._asked is None and not axes and len(meshes) <= 1:
            return dict.fromkeys(shardings, 1.0)  # every rank has all of it
        if self._asked is None and len(meshes) == len(axes) == 1:
            (mesh,), (axis,) = meshes, axes  # replicas have the same and need not be asked
            self.process_group = mesh.get_group(axis)
            return {
                sharding: 1.0 if sharding.axes else 1 / mesh.size(axis) for sharding in shardings
            }
        reach = _reach(meshes)
        if self._asked is None:
            self.process_group = _process_group_over(reach, meshes)
        else:
            _require_within(reach, self._asked)
        found = [_ranks(sharding.data) for sharding in shardings if sharding.data is not None]
        data = max(found, key=len, default=_NONE)
        return {sharding: 1 / _copies(sharding, data, reach) for sharding in shardings}


def norm_group_of(parameters: Parameters, process_group: dist.ProcessGroup | None) -> NormGroup:
    """Return the group of the norm of the gradients of ``parameters``.

    Parameters that ``fully_shard`` replaced, or that are unsharded now, stand for their sharded
    ones. A collective call if it makes a process group: the first time.

    Args:
        parameters: a module, a parameter or several; each counts once.
        process_group: ranks beyond the parameters' own meshes; None: those meshes.

    Raises:
        TypeError: if ``parameters`` is or holds something that is no tensor.
        ValueError: if ``process_group`` lacks ranks of the parameters' meshes.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    given = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    owner = owner_of(given[0]) if given else None
    known = None if owner is None else owner.notes.get(_NOTE)
    if isinstance(known, NormGroup) and known.is_of(given, process_group):
        return known
    found = NormGroup(given, process_group)
    if owner is not None:
        owner.notes[_NOTE] = found
    return found


def _seen_by_optimizers(given: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return the parameters that ``given`` ones stand for, each once."""
    standing: dict[int, torch.Tensor] = {}
    for param in given:
        if not isinstance(param, torch.Tensor):
            raise TypeError(
                f"parameters is or holds a {type(param).__name__}; pass a module, or its "
                "parameters()"
            )
        stands_for = sharded_of(param)
        standing[id(stands_for)] = stands_for
    return tuple(standing.values())


def _sharding_of(param: torch.Tensor) -> _Sharding:
    if not isinstance(param, DTensor):
        return _PLAIN
    owner, spec = owner_of(param), spec_of(param)
    axes = tuple([axis for axis, at in enumerate(spec.placements) if not at.is_replicate()])
    return _Sharding(spec.mesh, axes, None if owner is None else owner.mesh_info.mesh)


def _ranks(mesh: DeviceMesh) -> _Ranks:
    return frozenset(mesh.mesh.flatten().tolist())


def _reach(meshes: Sequence[DeviceMesh]) -> _Ranks:
    """Return the ranks of the mesh that holds all others; all ranks if none does."""
    if not meshes:
        return frozenset((dist.get_rank(),))
    sets = [_ranks(mesh) for mesh in meshes]
    largest = max(sets, key=len)
    if all(ranks <= largest for ranks in sets):
        return largest
    return frozenset(range(dist.get_world_size()))


def _copies(sharding: _Sharding, data: _Ranks, reach: _Ranks) -> float:
    """Return how many ranks of ``reach`` hold the same part; see [Note: copies].

    Args:
        sharding: what to count.
        data: the ranks that see other data.
        reach: the ranks that are asked.
    """
    if sharding.mesh is None:
        return len(reach)
    own = _ranks(sharding.mesh)
    shape = enumerate(sharding.mesh.shape)
    replicas = math.prod([size for axis, size in shape if axis not in sharding.axes])
    data = data if sharding.data is not None else _NONE
    # Meshes are grids: the ranks of ``own``, extended over ``data``, are this many.
    spanned = len(own) * len(data) / len(own & data) if data else len(own)
    return replicas * len(reach) / spanned


def _require_within(reach: _Ranks, process_group: dist.ProcessGroup) -> None:
    outside = reach - set(dist.get_process_group_ranks(process_group))
    if outside:
        raise ValueError(
            f"process_group lacks ranks {sorted(outside)}, over which the parameters are sharded; "
            "pass a group of all ranks that hold a part of the model, or None"
        )


def _process_group_over(ranks: _Ranks, meshes: Sequence[DeviceMesh]) -> dist.ProcessGroup:
    """Return a process group of ``ranks``; one is made where torch has none, once."""
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    if len(ranks) == world.size():
        return world
    for mesh in meshes:
        if mesh.ndim == 1 and _ranks(mesh) == ranks:
            return mesh.get_group()
    return known_subgroup(ranks)
