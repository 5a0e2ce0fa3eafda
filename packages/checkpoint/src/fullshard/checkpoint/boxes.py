"""Boxes: the part of a whole tensor that a rank holds, as an interval of indices in each dim.

Owns how a ``DTensor`` is cut, by the rule of comm's layouts over one axis of its mesh after
another, and so the box of any rank's shard. The computation needs shapes only: every rank knows
what every other one has, and nothing is sent.

[Note: order of cuts] Placements are read from the first axis to the last. Where ``fully_shard``
cuts a dim that tensor parallelism, a later axis, has cut before, its placement is a strided one.
Therefore strided axes come after all others. Among strided axes the last one comes first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from fullshard.comm import TensorSpec
from fullshard.sharding.spi import ShardingSpec, spec_of

__all__ = ["Box", "Cut", "box_at", "box_here", "box_of", "boxes_by_rank", "cuts_at", "cuts_of"]


@dataclass(frozen=True)
class Cut:
    """A cut into chunks over one axis of a mesh.

    Attributes:
        axis: of the mesh.
        dim: the dim that is cut.
        size: the length of that dim before the cut.
        count: how many chunks there are; the last may be empty.
        index: which chunk this rank has.
    """

    axis: int
    dim: int
    size: int
    count: int
    index: int

    def span(self, index: int) -> tuple[int, int]:
        """Return the start of a chunk in the dim, and its length."""
        rows = TensorSpec(shape=(self.size,), dtype=torch.uint8)  # comm's layouts own the rule
        start = rows.first_row(index, self.count)
        return start, rows.first_row(index + 1, self.count) - start


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor.

    Attributes:
        start: first index in each dim.
        size: number of indices in each dim.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """Last index in each dim, plus one."""
        return tuple([start + size for start, size in zip(self.start, self.size, strict=True)])

    @property
    def numel(self) -> int:
        """How many elements it has; 1 for a tensor without dims."""
        return math.prod(self.size)

    def overlap(self, other: Box) -> Box:
        """Return what is in both: without elements if nothing is."""
        start = tuple(map(max, self.start, other.start))
        stop = map(min, self.stop, other.stop)
        return Box(start, tuple([max(b - a, 0) for a, b in zip(start, stop, strict=True)]))

    def along(self, dim: int, start: int, size: int) -> Box:
        """Return a copy of the box with another interval in ``dim``."""
        starts, sizes = list(self.start), list(self.size)
        starts[dim], sizes[dim] = start, size
        return Box(tuple(starts), tuple(sizes))

    def chunk(self, cut: Cut, index: int) -> Box:
        """Return a chunk of it, which is what ``cut`` cuts."""
        start, size = cut.span(index)
        return self.along(cut.dim, self.start[cut.dim] + start, size)

    def of(self, tensor: torch.Tensor, held: Box | None = None) -> torch.Tensor:
        """Return this part of ``tensor``, a view.

        Args:
            tensor: the whole, or a part of it.
            held: the box of the whole tensor that ``tensor`` covers, which must contain this box;
                None: the whole.
        """
        first = (0,) * tensor.ndim if held is None else held.start
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            if size != tensor.size(dim):
                tensor = tensor.narrow(dim, start - first[dim], size)
        return tensor


def cuts_of(tensor: torch.Tensor) -> tuple[Cut, ...]:
    """Return the cuts of ``tensor`` in their order; see [Note: order of cuts]."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh"
    return cuts_at(spec_of(tensor), coordinate)


def cuts_at(spec: ShardingSpec, coordinate: Sequence[int]) -> tuple[Cut, ...]:
    """Return the cuts of a ``DTensor`` of ``spec`` for the rank at ``coordinate`` of its mesh."""
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


def box_at(spec: ShardingSpec, coordinate: Sequence[int]) -> Box:
    """Return what the rank at ``coordinate`` of its mesh has of a ``DTensor`` of ``spec``."""
    box = Box.whole(spec.shape)
    for cut in cuts_at(spec, coordinate):
        box = box.chunk(cut, cut.index)
    return box


def box_here(spec: ShardingSpec) -> Box:
    """Return what this rank has of a ``DTensor`` of ``spec``: nothing outside of its mesh."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return Box((0,) * len(spec.shape), (0,) * len(spec.shape))
    return box_at(spec, coordinate)


def box_of(tensor: torch.Tensor) -> Box:
    """Return what this rank has of ``tensor``; all of a plain one."""
    return box_here(spec_of(tensor)) if isinstance(tensor, DTensor) else Box.whole(tensor.shape)


def boxes_by_rank(tensor: DTensor) -> dict[int, Box]:
    """Return what each rank of its mesh, by its global number, has of ``tensor``."""
    ranks, spec = tensor.device_mesh.mesh, spec_of(tensor)
    places = itertools.product(*map(range, ranks.shape))
    return {int(ranks[place]): box_at(spec, place) for place in places}
