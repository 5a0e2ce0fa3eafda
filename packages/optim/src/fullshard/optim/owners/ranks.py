"""The ranks that hold parts of the same parameters: a process group, and who is where in the mesh.

Owns the choice of one process group for a mesh of any axes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding.mesh.mesh_info import device_of_mesh
from fullshard.sharding.mesh.subgroups import known_subgroup

__all__ = ["ALONE", "Ranks", "ranks_of"]


@dataclass(frozen=True)
class Ranks:
    """Those of a mesh, in the order of their process group.

    Attributes:
        process_group: all of them; None if this rank is alone.
        index: which of them is this rank.
        coordinates: where each is in the mesh.
        device: what the process group moves; None: wherever tensors are.
    """

    process_group: dist.ProcessGroup | None
    index: int
    coordinates: tuple[tuple[int, ...], ...]
    device: torch.device | None

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.coordinates)


ALONE = Ranks(None, 0, ((),), None)
"""The ranks that hold a plain tensor: this one, as far as it knows."""


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """Returns the ranks of ``mesh``; makes a process group where it has none of all its axes.

    A collective call of those ranks then, the first time.
    """
    numbers = mesh.mesh.flatten().tolist()
    if len(numbers) == 1:
        return Ranks(None, 0, ((0,) * mesh.ndim,), device_of_mesh(mesh))
    process_group = _process_group(mesh, numbers)
    ordered = dist.get_process_group_ranks(process_group)
    shape = mesh.mesh.shape
    places = {number: _unravelled(at, shape) for at, number in enumerate(numbers)}
    return Ranks(
        process_group,
        ordered.index(dist.get_rank()),
        tuple([places[number] for number in ordered]),
        device_of_mesh(mesh),
    )


def _process_group(mesh: DeviceMesh, numbers: list[int]) -> dist.ProcessGroup:
    long = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if len(long) == 1:
        return mesh.get_group(long[0])
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    return world if len(numbers) == world.size() else known_subgroup(frozenset(numbers))


def _unravelled(index: int, shape: torch.Size) -> tuple[int, ...]:
    """Returns the coordinates of the element number ``index`` of a tensor of ``shape``."""
    found = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        found.append(at)
    return tuple(reversed(found))
