"""Reductions in flight, from their launch until the sharded gradients are in place.

Owns the queue of a root: how many may run at once, and the commit at the end of backward, where one
device-to-host copy at most tells which parameters any rank used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fullshard.comm import CommStreams, EventKind, ReducedShards, emit
from fullshard.sharding.compat import post_accumulate_grad_hooks
from fullshard.sharding.param import FSDPParam

__all__ = ["InFlight", "PendingReduction", "ReductionQueue", "SharedComm"]


class InFlight(Protocol):
    """A reduction in flight, whatever it consists of."""

    @property
    def ready(self) -> bool:
        """Whether ``advance()`` would not block."""
        ...

    def advance(self) -> None:
        """Launches what follows, if anything does."""
        ...

    def wait(self) -> ReducedShards:
        """Returns the reduced shards; later calls give the same."""
        ...


@dataclass(kw_only=True)
class PendingReduction:
    """A reduction that was launched.

    Attributes:
        name: the group's name, for events.
        rank: this rank, for events.
        params: the parameters it carries, in the order of its layout.
        in_flight: what comm returned.
        complete: whether it gives gradients; else they are kept for a later one.
        lacks_gradient: whether this rank had no gradient for one of them.
    """

    name: str
    rank: int
    params: Sequence[FSDPParam]
    in_flight: InFlight
    complete: bool
    lacks_gradient: bool

    def commit(self, used: Sequence[bool]) -> None:
        """Adds the reduced gradients of the parameters that any rank used to the sharded ones."""
        reduced = self.in_flight.wait()
        if not self.complete:
            return
        for param, shard, is_used in zip(self.params, reduced.shards, used, strict=True):
            if not is_used:
                continue
            param.add_sharded_gradient(shard)
            for hook in post_accumulate_grad_hooks(param.sharded):
                hook(param.sharded)
        emit(EventKind.REDUCE_DONE, self.name, rank=self.rank)


class ReductionQueue:
    """The reductions of one root, in launch order."""

    def __init__(self) -> None:
        """Starts empty."""
        self._pending: list[PendingReduction] = []
        self._waited = 0

    def __len__(self) -> int:
        """Returns how many were launched and not committed."""
        return len(self._pending)

    def make_room(self, most: int) -> None:
        """Waits until fewer than ``most`` input buffers are in flight."""
        while len(self._pending) - self._waited >= most:
            self._pending[self._waited].in_flight.wait()
            self._waited += 1

    def push(self, reduction: PendingReduction) -> None:
        """Adds a reduction that was just launched, and launches what follows those before it."""
        self._pending.append(reduction)
        for pending in self._pending:  # in launch order, the same on all ranks
            if not pending.in_flight.ready:
                break
            pending.in_flight.advance()

    def commit(self) -> None:
        """Waits for all of them and puts the sharded gradients in place."""
        pending, self._pending, self._waited = self._pending, [], 0
        results = [reduction.in_flight.wait() for reduction in pending]
        lacking = [i for i, reduction in enumerate(pending) if reduction.lacks_gradient]
        marks = _read_marks([results[i] for i in lacking])
        for index, reduction in enumerate(pending):
            used = (
                marks[lacking.index(index)] if index in lacking else [True] * len(reduction.params)
            )
            reduction.commit(used)

    def discard(self) -> None:
        """Waits for all of them, so that nothing is in flight, and forgets them."""
        pending, self._pending, self._waited = self._pending, [], 0
        for reduction in pending:
            reduction.in_flight.wait()


@dataclass(frozen=True, kw_only=True)
class SharedComm:
    """What all groups of one root communicate through.

    Attributes:
        streams: the named streams.
        queue: the reductions in flight.
    """

    streams: CommStreams
    queue: ReductionQueue


def _read_marks(results: Sequence[ReducedShards]) -> list[list[bool]]:
    """Returns, per reduction, which parameters any rank had a gradient for: one host copy."""
    tensors = [result.marks for result in results if result.marks is not None]
    assert len(tensors) == len(results), "every reduction of a group carries marks"
    if not tensors:
        return []
    flat = torch.cat([marks > 0 for marks in tensors]).tolist()
    used, start = [], 0
    for marks in tensors:
        used.append(flat[start : start + marks.numel()])
        start += marks.numel()
    return used
