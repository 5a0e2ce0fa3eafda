"""New memory pages: what a step pays for memory that the C library gives back, and asks for again.

Whether an operation pays depends on all earlier frees, so the cost belongs to no single operation.
The step's allocations are made and freed again in their order, each page is touched, and the page
faults are counted. Owns that order, and what a page costs. Refuses computing.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import resource
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

__all__ = ["Allocations", "fits_here", "time_new_pages"]

_UNTIMED, _TIMED = 5, 30
_PROBED = 2**26  # bytes of new pages that tell what one costs


@dataclass(slots=True)
class Allocations:
    """Allocations and frees in order, a storage's number and its bytes from then on.

    Attributes:
        before: until the last ``restart()``; it determines the addresses of memory that a step
            keeps.
        step: since then.
    """

    before: list[tuple[int, int]] = field(default_factory=list)
    step: list[tuple[int, int]] = field(default_factory=list)

    def changed(self, number: int, nbytes: int) -> None:
        """Note what a storage has from now on; 0: it was freed."""
        self.step.append((number, nbytes))

    def restart(self) -> None:
        """Begin a step."""
        self.before += self.step
        self.step = []

    def most(self) -> int:
        """The most bytes that are alive at once."""
        alive: dict[int, int] = {}
        now = most = 0
        for number, nbytes in (*self.before, *self.step):
            now += nbytes - alive.get(number, 0)
            alive[number] = nbytes
            most = max(most, now)
        return most

    def __str__(self) -> str:
        """As a key of a table: equal for steps of equal sizes in equal order."""
        numbers: dict[int, int] = {}
        step = [(numbers.setdefault(number, len(numbers)), nbytes) for number, nbytes in self.step]
        told = hashlib.sha256(repr(step).encode()).hexdigest()
        return f"new pages of {len(step)} changes, {told[:16]}"


def fits_here(nbytes: int) -> bool:
    """Whether so much memory can be touched: no more than half of what the machine has."""
    return nbytes <= os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2


class _Memory:
    """Storages that are alive, by number, with each of their pages touched."""

    def __init__(self) -> None:
        self._held: dict[int, torch.Tensor] = {}

    def follow(self, changes: Iterable[tuple[int, int]]) -> None:
        """Free and allocate in this order."""
        for number, nbytes in changes:
            self._held.pop(number, None)
            if nbytes:
                made = self._held[number] = torch.empty(nbytes, dtype=torch.uint8)
                made[:: mmap.PAGESIZE].fill_(1)
                made[-1] = 1

    def sizes(self) -> dict[int, int]:
        """Bytes by number."""
        return {number: made.numel() for number, made in self._held.items()}

    def restore(self, sizes: dict[int, int]) -> None:
        """Free and allocate what differs from these sizes, so that a step can follow again."""
        now = self.sizes()
        self.follow((number, 0) for number in now.keys() - sizes.keys())
        self.follow(each for each in sizes.items() if now.get(each[0]) != each[1])


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _seconds_of_a_page() -> float:
    """The median time that the first touch of a page takes beyond the second."""
    found = []
    for _ in range(9):
        with mmap.mmap(-1, _PROBED) as pages:
            each_page = torch.frombuffer(pages, dtype=torch.uint8)[:: mmap.PAGESIZE]
            start = time.perf_counter()
            each_page.fill_(1)
            middle = time.perf_counter()
            each_page.fill_(1)
            found.append(2 * middle - start - time.perf_counter())
            del each_page
    return statistics.median(found) * mmap.PAGESIZE / _PROBED


def time_new_pages(allocations: Allocations) -> float:
    """The seconds of a step in which it waits for new pages: the median number times one's seconds.

    To be called in a process whose C library keeps freed memory as it does by default.
    """
    memory, found = _Memory(), []
    memory.follow(allocations.before)
    sizes = memory.sizes()
    for _ in range(_UNTIMED + _TIMED):
        before = _faults()
        memory.follow(allocations.step)
        found.append(_faults() - before)
        memory.restore(sizes)
    return statistics.median(found[_UNTIMED:]) * _seconds_of_a_page()
