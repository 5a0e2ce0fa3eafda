"""The part of a parameter that each rank holds, and the mesh axes whose ranks hold copies."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.checkpoint.spi import Box, box_at
from fullshard.sharding.spi import ShardingSpec

__all__ = ["held_by", "replicated_axes"]


def held_by(
    spec: ShardingSpec | None, shape: Sequence[int], coordinates: Sequence[Sequence[int]]
) -> tuple[Box, ...]:
    """Return what the ranks at ``coordinates`` hold of a tensor; ``spec``: None: all of it."""
    if spec is None:
        return (Box.whole(shape),)
    return tuple([box_at(spec, each) for each in coordinates])


def replicated_axes(spec: ShardingSpec | None) -> tuple[int, ...]:
    """Return the mesh axes whose ranks hold copies of a tensor."""
    placements = () if spec is None else spec.placements
    return tuple([axis for axis, each in enumerate(placements) if each.is_replicate()])
