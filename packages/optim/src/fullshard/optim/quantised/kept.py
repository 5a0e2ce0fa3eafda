"""The 8-bit state of a parameter, decided by its whole shape, and cut as it is.

Owns which parameters have codes and scales, and where this rank's are among them. ``blocks``
defines the content.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fullshard.checkpoint.spi import box_here
from fullshard.optim.base.stepped import Stepped
from fullshard.optim.quantised.blocks import SIZE, count_in
from fullshard.sharding.spi import local_of

__all__ = [
    "MOMENTS",
    "columns_of",
    "cuts_rows",
    "is_cut",
    "is_quantised",
    "part_here",
    "scale_name",
    "scale_shape",
    "scales_here",
]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The averages: of gradients, with signs, and of squares."""
_LEAST_ROW, _LEAST = 64, 4096


def is_quantised(shape: Sequence[int]) -> bool:
    """Return whether the averages of a parameter of this whole shape have 8 bits."""
    return len(shape) > 1 and shape[-1] >= _LEAST_ROW and math.prod(shape) >= _LEAST


def scale_name(moment: str) -> str:
    """Return the key of an average's scales."""
    return f"{moment}_scale"


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a parameter of ``shape``."""
    return (*shape[:-1], count_in(shape[-1]))


def cuts_rows(placements: Sequence[Any], ndim: int) -> bool:
    """Return whether placements of a tensor of ``ndim`` dims cut its last dim."""
    return any(not at.is_replicate() and at.dim == ndim - 1 for at in placements)


def is_cut(each: Stepped) -> bool:
    """Return whether a block may span two ranks: the state is quantised, and rows are cut."""
    if each.spec is None or not cuts_rows(each.spec.placements, each.param.ndim):
        return False
    return is_quantised(each.param.shape)


def columns_of(each: Stepped) -> tuple[int, int]:
    """Return which columns of the whole rows this rank has: the first, and where they end."""
    if each.spec is None or not is_cut(each):
        return 0, each.param.shape[-1]
    held = box_here(each.spec)
    return held.start[-1], held.stop[-1]


def part_here(each: Stepped, key: str) -> torch.Tensor:
    """Return this rank's part of a state that was checked."""
    value = each.state[key]
    return local_of(value)


def scales_here(each: Stepped, moment: str, columns: tuple[int, int]) -> torch.Tensor:
    """Return the scales of this rank's blocks in ``columns``, a view of the state."""
    scales = part_here(each, scale_name(moment))
    if not is_cut(each):
        return scales
    assert each.spec is not None, "it is cut"
    low, high = columns
    first = low // SIZE
    count = count_in(high) - first if high > low else 0
    return box_here(each.spec).along(-1, first, count).of(scales)
