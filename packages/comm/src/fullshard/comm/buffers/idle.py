"""What happens when a root has no gather and no reduction under way: memory may be given back."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["IDLE"]

IDLE: list[Callable[[], None]] = []
"""Called at the end of each step, and of a forward or block without one; it must not communicate.

Packages append to it when they are imported.
"""
