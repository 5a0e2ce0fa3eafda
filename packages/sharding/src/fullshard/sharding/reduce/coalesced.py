"""Coalesces the reductions of small groups that end their backwards one after another.

Owns the gradients that wait for those of their neighbours. The reductions are launched when the
last one is there, when another one would exceed the cap (bytes of all ranks' slices, with padding),
and at the end of backward. All ranks see groups reduce in the same order, so they launch alike.
``ReductionQueue`` launches. Gradients wait as autograd made them, where the buckets of
``DistributedDataParallel`` are memory of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fullshard.comm.spi import coalescing_pays, configs_coalesce, rank_major
from fullshard.sharding.reduce.launched import ReadyReductions, ReductionSetup
from fullshard.sharding.reduce.strategies import Gradients

__all__ = ["CoalescedReduction"]

_MOST_KEPT = 16  # set-ups of launches; who changes settings at each step needs none of the last


class CoalescedReduction:
    """The reductions of small groups that are gathered one after another."""

    def __init__(self, size: int) -> None:
        """Wait for ``size`` reductions."""
        self._size = size
        self._waiting: dict[ReductionSetup, Gradients] = {}
        self._nbytes = 0
        self._together = lru_cache(_MOST_KEPT)(_coalesced)

    def put(self, given: ReadyReductions, cap_mb: float) -> ReadyReductions:
        """Take the reductions of a group, and return those that are to be launched now.

        At most ``cap_mb`` MiB travel together.
        """
        ready: list[tuple[ReductionSetup, Gradients]] = []
        for setup, gradients in given:
            if not setup.coalesces:
                ready.append((setup, gradients))
                continue
            if setup in self._waiting or self._nbytes + setup.nbytes > cap_mb * 2**20:
                ready += self.pop()
            self._waiting[setup] = gradients
            self._nbytes += setup.nbytes
            if len(self._waiting) == self._size:
                ready += self.pop()
        return ready

    def pop(self) -> ReadyReductions:
        """Return and remove the waiting reductions: one for all if that is possible."""
        waiting, self._waiting, self._nbytes = self._waiting, {}, 0
        together = self._together(*waiting) if len(waiting) > 1 else None
        if together is None:
            return list(waiting.items())
        return [(together, [each for some in waiting.values() for each in some])]

    def abandon(self) -> None:
        """Drop the waiting reductions: their backward raised."""
        self._waiting, self._nbytes = {}, 0

    def forget(self) -> None:
        """Forget how reductions were launched: parameters were replaced."""
        self._together.cache_clear()


def _coalesced(*waiting: ReductionSetup) -> ReductionSetup | None:
    """Return how to launch all of ``waiting`` at once; None if that is not possible."""
    first = waiting[0]
    for each in waiting:
        if not (
            each.layout.buffer.dtype is first.layout.buffer.dtype
            and each.wire == first.wire
            and configs_coalesce(each.config, first.config)
            and coalescing_pays(each.layout, each.config)
        ):
            return None
    specs = tuple([spec for each in waiting for spec in each.layout.specs])
    layout = rank_major(specs, first.layout.world_size, len(specs))
    name = f"{waiting[-1].config.name} to {first.config.name}"
    return replace(
        first,
        names=tuple([name for each in waiting for name in each.names]),
        params=tuple([param for each in waiting for param in each.params]),
        layout=layout,
        config=replace(first.config, name=name),
    )
