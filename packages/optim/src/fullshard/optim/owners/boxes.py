"""Boxes: the ranges of indices that a rank, or a matrix, has of a whole parameter.

Owns which part of a parameter each rank of its mesh holds, by the cuts that checkpoints know. All
is arithmetic on shapes, so every rank knows what every other holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.checkpoint.cuts import cuts_at
from fullshard.sharding.base.compat import ShardingSpec

__all__ = ["Box", "box_here", "box_of", "held_by", "replicated_axes"]


@dataclass(frozen=True, slots=True)
class Box:
    """One range of indices per dim.

    Attributes:
        starts: the first index of each dim.
        stops: one more than the last.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box of all indices of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """How many indices there are per dim."""
        return tuple([b - a for a, b in zip(self.starts, self.stops, strict=True)])

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def narrowed(self, dim: int, start: int, size: int) -> Box:
        """Returns the part of it with ``size`` indices of ``dim``, counted from its own start."""
        starts, stops = list(self.starts), list(self.stops)
        starts[dim] += start
        stops[dim] = starts[dim] + size
        return Box(tuple(starts), tuple(stops))

    def common(self, other: Box) -> Box:
        """Returns what both have; a box of no element if they have nothing in common."""
        starts = tuple(map(max, self.starts, other.starts))
        return Box(starts, tuple(map(max, starts, map(min, self.stops, other.stops))))

    def of(self, tensor: torch.Tensor, held: Box) -> torch.Tensor:
        """Returns the view of this box in ``tensor``, which holds the box ``held`` around it."""
        if self == held:
            return tensor
        lows = [a - origin for a, origin in zip(self.starts, held.starts, strict=True)]
        ranges = zip(lows, self.shape, strict=True)
        return tensor[tuple([slice(low, low + size) for low, size in ranges])]


def box_here(spec: ShardingSpec) -> Box:
    """Returns what this rank holds of a parameter of ``spec``."""
    coordinate = spec.mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh"
    return box_of(spec, coordinate)


def box_of(spec: ShardingSpec, coordinate: Sequence[int]) -> Box:
    """Returns what the rank at ``coordinate`` of the mesh of ``spec`` holds of a parameter."""
    box = Box.whole(spec.shape)
    for cut in cuts_at(spec, coordinate):
        rows = -(-cut.size // cut.count)
        start = min(cut.index * rows, cut.size)
        box = box.narrowed(cut.dim, start, min(rows, cut.size - start))
    return box


def held_by(
    spec: ShardingSpec | None, shape: Sequence[int], coordinates: Sequence[Sequence[int]]
) -> tuple[Box, ...]:
    """Returns what the ranks at ``coordinates`` hold of a tensor; ``spec``: None: all of it."""
    if spec is None:
        return (Box.whole(shape),)
    return tuple([box_of(spec, each) for each in coordinates])


def replicated_axes(spec: ShardingSpec | None) -> tuple[int, ...]:
    """Returns the axes of its mesh along which ranks have copies of a tensor."""
    placements = () if spec is None else spec.placements
    return tuple([axis for axis, each in enumerate(placements) if each.is_replicate()])
