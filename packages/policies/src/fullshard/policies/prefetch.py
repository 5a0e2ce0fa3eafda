"""Prefetch: what is gathered ahead of its use.

Owns answers to sharding's question. More depth hides more communication and holds more unsharded
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DepthPrefetch", "NoPrefetch"]


@dataclass(frozen=True, kw_only=True)
class DepthPrefetch:
    """Gathers a number of modules ahead, in the order in which they ran last.

    Attributes:
        forward: how many modules ahead in forward, in the order of the forward before this one.
        backward: how many modules ahead in backward, in the reverse of the forward order.
    """

    forward: int = 1
    backward: int = 1

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            TypeError: if a depth is not an int.
            ValueError: if it is negative.
        """
        for name in ("forward", "backward"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; pass a number of modules")
            if value < 0:
                raise ValueError(f"{name} is {value}; pass 0 or more modules")

    def in_forward(self, order: Sequence[str], position: int) -> Sequence[int]:
        """Return the next positions."""
        return range(position + 1, min(position + 1 + self.forward, len(order)))

    def in_backward(self, order: Sequence[str], position: int) -> Sequence[int]:
        """Return the positions before, nearest first."""
        return range(position - 1, max(position - 1 - self.backward, -1), -1)


@dataclass(frozen=True, kw_only=True)
class NoPrefetch:
    """Gathers nothing ahead: least memory, every gather exposed."""

    def in_forward(self, order: Sequence[str], position: int) -> Sequence[int]:
        """Return nothing."""
        return ()

    def in_backward(self, order: Sequence[str], position: int) -> Sequence[int]:
        """Return nothing."""
        return ()
