"""The ranks that share parameters, their process group, and their coordinates in the mesh.

Owns the choice of one process group for a mesh of any axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.sharding.spi import device_of_mesh, known_subgroup

__all__ = ["ALONE", "Ranks", "group_of", "ranks_of"]


@dataclass(frozen=True)
class Ranks:
    """The ranks of a mesh, in the order of their process group.

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
    """Return the ranks of ``mesh``; makes a process group where it has none of all its axes.

    A collective call of those ranks then, the first time.
    """
    process_group, device = group_of(mesh), device_of_mesh(mesh)
    if process_group is None:
        return Ranks(None, 0, ((0,) * mesh.ndim,), device)
    numbers = mesh.mesh.flatten().tolist()
    ordered = dist.get_process_group_ranks(process_group)
    places = {number: _unravelled(at, mesh.shape) for at, number in enumerate(numbers)}
    return Ranks(
        process_group,
        ordered.index(dist.get_rank()),
        tuple([places[number] for number in ordered]),
        device,
    )


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the process group of all ranks of ``mesh``, as ``ranks_of``; None if it is one."""
    long = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    if len(long) < 2:
        return mesh.get_group(long[0]) if long else None
    world = dist.group.WORLD
    assert world is not None, "a mesh has a process group"
    if mesh.size() == world.size():
        return world
    return known_subgroup(frozenset(mesh.mesh.flatten().tolist()))


def _unravelled(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of the element number ``index`` of a tensor of ``shape``."""
    found = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        found.append(at)
    return tuple(reversed(found))
