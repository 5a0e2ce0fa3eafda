"""Functions that give memory back when a step, or a forward without gradients, has ended."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["IDLE"]

IDLE: list[Callable[[], None]] = []
"""Called at the end of a step, of a forward without gradients, and of an ``unsharded`` block.

Packages append to it when they are imported. The functions must not communicate: ranks may come to
such an end at different times.
"""
