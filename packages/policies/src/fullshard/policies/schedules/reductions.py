"""Coalesces the reductions of small groups that end their backwards one after another.

Owns the gradients that wait for those of their neighbours. The reductions are launched with the
last one, before another one would exceed the cap, and at the end of backward. The cap counts bytes
of all ranks' slices, with padding. All ranks see groups reduce in the same order, so they launch
alike. Gradients wait as autograd made them, where the buckets of ``DistributedDataParallel`` are
memory of their own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from fullshard.comm.spi import rank_major
from fullshard.policies.schedules.sizes import alike, pays
from fullshard.sharding.spi import PlainReduce, ReadyReductions, ReductionSetup

__all__ = ["CoalescedReduction"]

_MOST_KEPT = 16  # set-ups of launches; who changes settings at each step needs none of the last


class CoalescedReduction:
    """The reductions of small groups that are gathered one after another."""

    def __init__(self, size: int, cap: float) -> None:
        """Wait for ``size`` reductions of at most ``cap`` bytes in all."""
        self._size, self._cap = size, cap
        self._waiting: dict[ReductionSetup, list[torch.Tensor | None]] = {}
        self._nbytes = 0
        self._together = lru_cache(_MOST_KEPT)(_coalesced)

    def put(self, given: ReadyReductions) -> ReadyReductions:
        """Take the reductions of a group, and return those that are to be launched now."""
        ready: list[tuple[ReductionSetup, list[torch.Tensor | None]]] = []
        for setup, gradients in given:
            if not _may_join(setup):
                ready.append((setup, gradients))
                continue
            nbytes = setup.layout.buffer.slice_nbytes * setup.layout.world_size
            if setup in self._waiting or self._nbytes + nbytes > self._cap:
                ready += self.pop()
            self._waiting[setup] = gradients
            self._nbytes += nbytes
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


def _may_join(setup: ReductionSetup) -> bool:
    """Return whether the result of a reduction is the gradients, without a hook on its buffer."""
    settings = setup.settings
    own = settings.hook is not None or settings.comm is not None or settings.zero_unused
    varies = isinstance(settings.divide_factor, torch.Tensor)
    return type(setup.strategy) is PlainReduce and not own and not varies


def _coalesced(*waiting: ReductionSetup) -> ReductionSetup | None:
    """Return how to launch all of ``waiting`` at once; None if that is not possible."""
    first = waiting[0]
    for each in waiting:
        if not (
            each.layout.buffer.dtype is first.layout.buffer.dtype
            and each.wire == first.wire
            and alike(each.config, first.config)
            and pays(each.layout, each.config)
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
