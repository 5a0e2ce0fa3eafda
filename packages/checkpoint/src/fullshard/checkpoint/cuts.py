"""How a sharded tensor is cut: by ``torch.chunk``'s rule, over one axis of its mesh after another.

Owns the rule and the order; gathering, scattering and loading read them here. It sends nothing.

[Note: order of cuts] Placements are read from the first axis to the last. Where ``fully_shard``
cuts a dim that tensor parallelism, a later axis, has cut before, its placement is a strided one. So
strided axes come after all others, and among themselves from the last axis to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from fullshard.comm import TensorSpec
from fullshard.sharding.base.compat import ShardingSpec, spec_of

__all__ = ["Cut", "cuts_at", "cuts_of"]


@dataclass(frozen=True)
class Cut:
    """A cut into chunks over one axis of a mesh.

    Attributes:
        axis: of the mesh.
        dim: along which tensors are cut.
        size: what they have along it before the cut.
        count: how many chunks there are; the last may be empty.
        index: which chunk this rank has.
    """

    axis: int
    dim: int
    size: int
    count: int
    index: int

    def span(self, index: int) -> tuple[int, int]:
        """Returns where a chunk starts along the dim, and its length."""
        rows = TensorSpec(shape=(self.size,), dtype=torch.uint8)  # comm's layouts own the rule
        start = rows.first_row(index, self.count)
        return start, rows.first_row(index + 1, self.count) - start

    def chunk(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Returns a chunk of ``tensor``, a view."""
        return tensor.narrow(self.dim, *self.span(index))


def cuts_of(tensor: torch.Tensor) -> tuple[Cut, ...]:
    """Returns the cuts of ``tensor`` in their order; see [Note: order of cuts]."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh"
    return cuts_at(spec_of(tensor), coordinate)


def cuts_at(spec: ShardingSpec, coordinate: Sequence[int]) -> tuple[Cut, ...]:
    """Returns the cuts of a ``DTensor`` of ``spec`` for the rank at ``coordinate`` of its mesh."""
    mesh, placements = spec.mesh, dict[int, Any](enumerate(spec.placements))
    axes = [axis for axis, placed in placements.items() if not placed.is_replicate()]
    axes.sort(key=lambda axis: axis if type(placements[axis]) is Shard else 2 * mesh.ndim - axis)
    cuts: list[Cut] = []
    left = list(spec.shape)
    for axis in axes:
        dim, index = placements[axis].dim, coordinate[axis]
        cuts.append(Cut(axis, dim, left[dim], mesh.size(axis), index))
        left[dim] = cuts[-1].span(index)[1]
    return tuple(cuts)
