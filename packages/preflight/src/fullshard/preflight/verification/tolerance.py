"""What rounding alone may make differ: it follows from the dtype, the world size and the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["Tolerance"]

_FULL = 64
_HALF = 8


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far two values may lie apart that differ by the order of additions alone.

    A sum of ``n`` terms in another order differs by about ``eps * sqrt(n)`` of its terms' size
    (Higham 2002, section 4.2, for errors that are independent). Matrix products hide in ``FACTOR``:
    64 for 32 and 64 bits, and 8 for 16 bits, whose sums are kept in 32 and round at the end alone.
    Each further step may make of a difference four times as much. A tensor whose exact value is 0,
    such as the gradient of a key's bias in attention, is all rounding: beside its own norm counts
    the mean size of all tensors of its kind.

    Attributes:
        dtype: the coarsest dtype that either run computed in.
        world_size: over how many ranks gradients are reduced.
        stretch: a user's factor.
        growth: by what it grows from step to step.
    """

    dtype: torch.dtype
    world_size: int
    stretch: float = 1.0
    growth: int = 4

    @property
    def relative(self) -> float:
        """The allowed difference of a gradient in the first step, as part of its norm."""
        info = torch.finfo(self.dtype)
        factor = _FULL if info.bits >= 32 else _HALF
        return self.stretch * factor * info.eps * math.sqrt(self.world_size)

    def at(self, step: int) -> float:
        """The same in ``step``, from 0."""
        return float(self.relative * self.growth**step)

    def __str__(self) -> str:
        """The numbers."""
        dtype = str(self.dtype).removeprefix("torch.")
        more = "and in all others"
        if self.growth > 1:
            more = f"{self.growth} times that for each more"
        return (
            f"{self.relative:.2g} of a tensor's norm in step 0, {more} "
            f"({dtype}, {self.world_size} ranks)"
        )
