"""Messages between the ranks of a measurement: barriers, agreement, gathering of numbers.

Owns what happens between steps. Without other ranks (`lonely`) every answer is this rank's own.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The ranks of a group; `group` None: this one alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def meet(self) -> None:
        """Wait until all ranks are here, on the CPU, so that no device is involved."""
        if self._group is not None and self._group.size() > 1:
            dist.all_reduce(torch.zeros(1), group=self._group)

    def gather(self, value: T) -> list[T]:
        """The picklable `value` of every rank, in rank order."""
        if self._group is None or self._group.size() == 1:
            return [value]
        found: list[T | None] = [None] * self._group.size()
        dist.all_gather_object(found, value, group=self._group)
        return [each for each in found if each is not None]

    def first_failure(self, message: str) -> str:
        """The message of the lowest rank whose message is not empty; "" if there is none."""
        for rank, each in enumerate(self.gather(message)):
            if each:
                return each if self._group is None else f"rank {rank}: {each}"
        return ""

    def slowest(self, values: list[float]) -> tuple[float, ...]:
        """For each position, the largest value over the ranks."""
        return tuple(max(column) for column in zip(*self.gather(values), strict=True))

    def mean(self, values: list[float]) -> tuple[float, ...]:
        """For each position, the mean over the ranks."""
        columns = zip(*self.gather(values), strict=True)
        return tuple(sum(column) / len(column) for column in columns)
