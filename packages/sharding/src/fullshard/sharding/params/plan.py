"""The layouts of gathers and reductions: one launch of all parameters, whatever their dtypes."""

from __future__ import annotations

import functools

from fullshard.comm import RankMajorLayout, TensorSpec

__all__ = ["rank_major"]


@functools.lru_cache(maxsize=1024)
def rank_major(specs: tuple[TensorSpec, ...], world_size: int, marks: int) -> RankMajorLayout:
    """Returns one object for groups that are alike, so that what is kept per layout is found."""
    return RankMajorLayout(specs, world_size, mask_numel=marks)
