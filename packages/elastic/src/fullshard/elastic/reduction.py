"""Reductions that continue between replica groups, during backward.

Owns the wire policy that adds this to the reductions of a sharded model, and the handle of a
reduction. A handle gives its slice to ``Exchange`` when the group's own reduction is over. An error
between groups raises nothing here: the step is not committed. The main class is ``ReplicaWire``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.comm import (
    AllGather,
    Layout,
    ReduceConfig,
    ReducedShards,
    ReduceInFlight,
    TensorSpec,
)
from fullshard.comm.spi import ReducePlan, SeveralWorks
from fullshard.sharding import WireForms

__all__ = ["Exchange", "ReplicaWire"]


class Exchange(Protocol):
    """Sums slices over replica groups."""

    def submit(self, flight: ReduceInFlight) -> Future[torch.Tensor | None]:
        """Begin to sum the result of ``flight``, which is over, in place.

        The result is None when the sum is in the slice, or the sum, to be copied there.
        """

    def fail(self, reason: str) -> None:
        """Drop the step on all groups."""


class ReplicaWire:
    """A wire policy whose reductions go on between replica groups; ``ReplicaGroups.wire`` makes it.

    Attributes:
        inner: chooses the forms inside a group.
        exchange: sums gradients over the replica groups.
    """

    def __init__(self, inner: WireForms, exchange: Exchange) -> None:
        self.inner = inner
        self.exchange = exchange

    @property
    def hosts(self) -> object:
        """What ranks compare of the inner policy, if it has such a thing."""
        return getattr(self.inner, "hosts", None)

    def unmatched(self, names: Sequence[str]) -> Sequence[str]:
        """See ``WireForms``."""
        return self.inner.unmatched(names)

    def gathered_as(
        self, name: str, spec: TensorSpec, ranks: int, device: torch.device
    ) -> TensorSpec:
        """See ``WireForms``."""
        return self.inner.gathered_as(name, spec, ranks, device)

    def reduced_as(
        self, name: str, spec: TensorSpec, ranks: int, device: torch.device
    ) -> TensorSpec:
        """See ``WireForms``."""
        return self.inner.reduced_as(name, spec, ranks, device)

    def all_gather(self, process_group: dist.ProcessGroup, /) -> AllGather:
        """See ``WireForms``."""
        return self.inner.all_gather(process_group)

    def reduction(
        self, layout: Layout, forms: Sequence[TensorSpec], config: ReduceConfig
    ) -> ReducePlan:
        """See ``WireForms``."""
        return _ReplicaPlan(self.inner.reduction(layout, forms, config), self.exchange)


class _ReplicaPlan(ReducePlan):
    """The plan of a group's reductions, which continue between groups."""

    def __init__(self, inner: ReducePlan, exchange: Exchange) -> None:
        super().__init__(inner.layout, inner.config)
        self._inner = inner
        self._exchange = exchange

    def launch(self, gradients: list[torch.Tensor | None]) -> ReduceInFlight:
        """See ``ReducePlan.launch``."""
        return _ReplicaInFlight(self._inner.launch(gradients), self._exchange)


class _ReplicaInFlight(ReduceInFlight):
    """A group's reduction and what follows between groups, used as a ``ReduceInFlight``."""

    def __init__(self, inner: ReduceInFlight, exchange: Exchange) -> None:
        super().__init__(plan=inner.plan, packed=None, event=inner.event)
        self._inner = inner
        self._exchange = exchange
        self._sum: Future[torch.Tensor | None] | None = None
        self.work = SeveralWorks((), self._complete)  # a later all-reduce has to wait for it
        if inner.work is None:
            self._submit()

    def _submit(self) -> None:
        self._inner.wait()
        self.output = self._inner.output
        self._sum = self._exchange.submit(self._inner)

    def launch_second(self) -> None:
        """Wait for the group's own reduction, and begin what follows."""
        if self._sum is None:
            self._submit()
        self._inner.wait()

    def wait(self) -> ReducedShards:
        """Return the shards, summed over groups unless the step is dropped."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self._inner.wait()

    def discard(self) -> None:
        """Wait for the group's own reduction; the step is dropped on all groups."""
        self._exchange.fail("a backward did not end")
        self._inner.wait()

    @torch.no_grad()
    def _complete(self) -> None:
        self.launch_second()
        assert self._sum is not None, "it was submitted"
        total = self._sum.result()
        if total is not None:
            self._inner.output.copy_(total)
            self.event = self.plan.config.streams.record()
