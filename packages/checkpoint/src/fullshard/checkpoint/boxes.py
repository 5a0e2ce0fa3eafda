"""Boxes: which part of a whole tensor a rank has, an interval of indices along each dim.

Owns the box of any rank's shard, from its cuts. All is arithmetic on shapes, so every rank knows
what every other one has; nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.cuts import Cut, cuts_at
from fullshard.sharding.base.compat import ShardingSpec, spec_of

__all__ = ["Box", "box_at", "box_here", "box_of"]


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor.

    Attributes:
        start: the first index along each dim.
        size: how many there are along each dim.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box of a whole tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """One more than the last index along each dim."""
        return tuple([start + size for start, size in zip(self.start, self.size, strict=True)])

    @property
    def numel(self) -> int:
        """How many elements it has; 1 for a tensor without dims."""
        return math.prod(self.size)

    def overlap(self, other: Box) -> Box:
        """Returns what is in both: without elements if nothing is."""
        start = tuple(map(max, self.start, other.start))
        stop = map(min, self.stop, other.stop)
        return Box(start, tuple([max(b - a, 0) for a, b in zip(start, stop, strict=True)]))

    def along(self, dim: int, start: int, size: int) -> Box:
        """Returns the box with another interval along ``dim``."""
        starts, sizes = list(self.start), list(self.size)
        starts[dim], sizes[dim] = start, size
        return Box(tuple(starts), tuple(sizes))

    def chunk(self, cut: Cut, index: int) -> Box:
        """Returns a chunk of it, which is what ``cut`` cuts."""
        start, size = cut.span(index)
        return self.along(cut.dim, self.start[cut.dim] + start, size)

    def of(self, tensor: torch.Tensor, held: Box | None = None) -> torch.Tensor:
        """Returns this part of ``tensor``, a view.

        Args:
            tensor: the whole, or a part of it.
            held: which part of the whole that is, all of this box in it; None: the whole.
        """
        first = (0,) * tensor.ndim if held is None else held.start
        for dim, (start, size) in enumerate(zip(self.start, self.size, strict=True)):
            if size != tensor.size(dim):
                tensor = tensor.narrow(dim, start - first[dim], size)
        return tensor


def box_at(spec: ShardingSpec, coordinate: Sequence[int]) -> Box:
    """Returns what the rank at ``coordinate`` of its mesh has of a ``DTensor`` of ``spec``."""
    box = Box.whole(spec.shape)
    for cut in cuts_at(spec, coordinate):
        box = box.chunk(cut, cut.index)
    return box


def box_here(spec: ShardingSpec) -> Box:
    """Returns what this rank has of a ``DTensor`` of ``spec``: nothing outside of its mesh."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return Box((0,) * len(spec.shape), (0,) * len(spec.shape))
    return box_at(spec, coordinate)


def box_of(tensor: torch.Tensor) -> Box:
    """Returns what this rank has of ``tensor``; all of a plain one."""
    return box_here(spec_of(tensor)) if isinstance(tensor, DTensor) else Box.whole(tensor.shape)
