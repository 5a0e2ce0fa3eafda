"""The difference that rounding alone may cause: it follows from the dtype and the world size."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

__all__ = ["Tolerance"]

_FULL = 64
_HALF = 8
_STEP = 16


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The allowed distance between two values that differ by the order of additions alone.

    A sum of ``n`` terms in another order differs by about ``eps * sqrt(n)`` of its terms' size
    (Higham 2002, section 4.2, for independent errors). Matrix products hide in a factor: 64 for 32
    and 64 bits, and 8 for 16 bits, whose sums are kept in 32 and round at the end alone. A tensor
    whose exact value is 0, such as the gradient of a key's bias in attention, is all rounding: the
    mean size of all tensors of its kind counts in addition to its own norm.

    The reference's optimizer takes the gradients of the sharded run, once they are found to be
    equal. Therefore their rounding affects both updates equally, and no difference grows from step
    to step.

    Attributes:
        dtype: the coarsest dtype that either run computed in.
        world_size: over how many ranks gradients are reduced.
        stretch: a user's factor.
    """

    dtype: torch.dtype
    world_size: int
    stretch: float = 1.0

    @property
    def relative(self) -> float:
        """The allowed difference of a gradient, as part of its norm."""
        info = torch.finfo(self.dtype)
        factor = _FULL if info.bits >= 32 else _HALF
        return self.stretch * factor * info.eps * math.sqrt(self.world_size)

    def of(self, dtype: torch.dtype) -> Tolerance:
        """Return the same for values of another dtype."""
        return replace(self, dtype=dtype)

    def of_update(self, *, norm: float, moved: float, steps: int) -> float:
        """Return the allowed difference of a parameter that the same gradients moved.

        Args:
            norm: of the parameter.
            moved: the norm of its way since the beginning.
            steps: how many led to here; each rounds once more.
        """
        rounding = 4 * self.stretch * torch.finfo(self.dtype).eps * steps
        return rounding * norm + min(_STEP * self.relative, math.sqrt(self.relative)) * moved

    def __str__(self) -> str:
        """The numbers."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.relative:.2g} of a tensor's norm ({dtype}, {self.world_size} ranks)"
