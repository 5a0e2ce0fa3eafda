"""What a group's collectives look like, computed once and reused at every step.

Owns the layouts: one gather of all parameters whatever their dtypes, one reduction per reduce
dtype. It knows shapes and dtypes, no tensor that holds values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from fullshard.comm import Layout, RankMajorLayout, TensorSpec
from fullshard.sharding.params.param import FSDPParam

__all__ = ["GroupPlan", "ReductionPlan", "rank_major"]

_trains = attrgetter("sharded.requires_grad")


@dataclass(frozen=True, kw_only=True, eq=False)
class ReductionPlan:
    """One reduction launch. Each equals itself only: what is kept for one is found by it.

    Attributes:
        indices: which of the group's parameters it carries.
        layout: where they lie, one mark each behind them.
        dtype: the dtype in which it reduces.
    """

    indices: tuple[int, ...]
    layout: Layout
    dtype: torch.dtype


class GroupPlan:
    """The layouts of one group."""

    def __init__(self, params: Sequence[FSDPParam], world_size: int) -> None:
        """Plans nothing yet. ``world_size``: ranks over which it is sharded."""
        self._params = params
        self._world_size = world_size
        self._reductions: dict[tuple[bool, ...], tuple[ReductionPlan, ...]] = {}

    @property
    def gather(self) -> Layout:
        """The layout of a gather of all."""
        return rank_major(tuple(param.gather_spec for param in self._params), self._world_size, 0)

    def forget(self) -> None:
        """Plans anew, as parameters or their dtypes are others now."""
        self._reductions.clear()

    def reductions(self, params: Sequence[FSDPParam]) -> tuple[ReductionPlan, ...]:
        """Returns the reductions of those of ``params`` that require a gradient now.

        The layout holds every one of them, with a gradient on this rank or without: its size must
        not depend on what one rank happened to use.
        """
        trainable = tuple(map(_trains, params))
        if trainable not in self._reductions:
            self._reductions[trainable] = self._plan(params, trainable)
        return self._reductions[trainable]

    def _plan(
        self, params: Sequence[FSDPParam], trainable: tuple[bool, ...]
    ) -> tuple[ReductionPlan, ...]:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, param in enumerate(params):
            if trainable[index]:
                by_dtype.setdefault(param.reduce_dtype, []).append(index)
        plans = []
        for dtype, indices in by_dtype.items():
            specs = tuple(
                TensorSpec(shape=params[i].gather_spec.shape, dtype=dtype, dim=params[i].dim)
                for i in indices
            )
            layout = rank_major(specs, self._world_size, len(indices))
            plans.append(ReductionPlan(indices=tuple(indices), layout=layout, dtype=dtype))
        return tuple(plans)


@functools.lru_cache(maxsize=1024)
def rank_major(specs: tuple[TensorSpec, ...], world_size: int, marks: int) -> RankMajorLayout:
    """Returns one object for groups that are alike, so that what is kept per layout is found."""
    return RankMajorLayout(specs, world_size, marks=marks)
