"""The layout of a group's gather: one of all parameters, whatever their dtypes.

It knows shapes and dtypes, no tensor that holds values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from fullshard.comm import Layout, RankMajorLayout, TensorSpec
from fullshard.sharding.params.param import FSDPParam

__all__ = ["GroupPlan", "rank_major"]


class GroupPlan:
    """The layout of one group's gathers."""

    def __init__(self, params: Sequence[FSDPParam], world_size: int) -> None:
        """Takes the parameters. ``world_size``: ranks over which it is sharded."""
        self._params = params
        self._world_size = world_size

    @property
    def gather(self) -> Layout:
        """The layout of a gather of all."""
        return rank_major(tuple(param.gather_spec for param in self._params), self._world_size, 0)


@functools.lru_cache(maxsize=1024)
def rank_major(specs: tuple[TensorSpec, ...], world_size: int, marks: int) -> RankMajorLayout:
    """Returns one object for groups that are alike, so that what is kept per layout is found."""
    return RankMajorLayout(specs, world_size, marks=marks)
