"""Reductions in flight, from their launch until the sharded gradients are in place.

Owns the queue of a root: how many may run at once, and the commit at the end of backward, where one
device-to-host copy at most tells which parameters any rank used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fullshard.comm import (
    BufferPool,
    BufferSource,
    CommStreams,
    EventKind,
    NewBuffers,
    ReducedShards,
    emit,
)
from fullshard.sharding.base.compat import post_accumulate_grad_hooks
from fullshard.sharding.params.param import FSDPParam

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

    def land(self) -> None:
        """Waits for the reduce-scatter alone, which frees its inputs; a backward may yet fail."""
        ...

    def wait(self) -> ReducedShards:
        """Returns the reduced shards; later calls give the same."""
        ...


@dataclass(kw_only=True)
class PendingReduction:
    """A reduction that was launched.

    Attributes:
        names: those of its groups, for events.
        rank: this rank, for events.
        params: the parameters it carries, in the order of its layout.
        in_flight: what comm returned.
        complete: whether it gives gradients; else they are kept for a later one.
        lacks_gradient: whether this rank had no gradient for one of them.
    """

    names: tuple[str, ...]
    rank: int
    params: Sequence[FSDPParam]
    in_flight: InFlight
    complete: bool
    lacks_gradient: bool

    def stage_out(self, used: Sequence[bool]) -> list[torch.Tensor | None]:
        """Begins to bring the gradients of the parameters that any rank used where they live."""
        reduced = self.in_flight.wait()
        return [
            param.stage_gradient(shard) if is_used and self.complete else None
            for param, shard, is_used in zip(self.params, reduced.shards, used, strict=True)
        ]

    def commit(self, staged: Sequence[torch.Tensor | None]) -> None:
        """Adds what ``stage_out`` gave to the sharded gradients."""
        for param, gradient in zip(self.params, staged, strict=True):
            if gradient is not None:
                param.add_sharded_gradient(gradient, keep=False)

    def announce(self, staged: Sequence[torch.Tensor | None]) -> None:
        """Calls the user's hooks on the parameters that got a gradient."""
        for param, gradient in zip(self.params, staged, strict=True):
            for hook in post_accumulate_grad_hooks(param.sharded) if gradient is not None else ():
                hook(param.sharded)
        for name in self.names if self.complete else ():
            emit(EventKind.REDUCE_DONE, name, rank=self.rank)


class ReductionQueue:
    """The reductions of one root, in launch order."""

    def __init__(self) -> None:
        """Starts empty."""
        self._pending: list[PendingReduction] = []
        self._travelling: deque[PendingReduction] = deque()  # that have inputs of their own
        self._followed: deque[PendingReduction] = deque()  # what follows them is yet to be launched
        self._sealed = 0

    def __len__(self) -> int:
        """Returns how many were launched and not committed."""
        return len(self._pending)

    def make_room(self, most: int) -> None:
        """Waits until fewer than ``most`` input buffers are in flight."""
        while len(self._travelling) >= most:
            self._travelling.popleft().in_flight.land()

    def push(self, reduction: PendingReduction) -> None:
        """Adds a reduction that was just launched, and launches what follows those before it."""
        self._pending.append(reduction)
        self._travelling.append(reduction)
        self._followed.append(reduction)
        while self._followed and self._followed[0].in_flight.ready:  # in launch order, as all ranks
            self._followed.popleft().in_flight.advance()

    def commit(self) -> None:
        """Waits for all of them and puts the sharded gradients in place."""
        pending, self._pending = self._pending, []
        self._travelling.clear()
        self._followed.clear()
        self._sealed = 0
        results = [reduction.in_flight.wait() for reduction in pending]
        lacking = [i for i, reduction in enumerate(pending) if reduction.lacks_gradient]
        marks = _read_marks([results[i] for i in lacking])
        staged = [
            reduction.stage_out(
                marks[lacking.index(i)] if i in lacking else [True] * len(reduction.params)
            )
            for i, reduction in enumerate(pending)
        ]
        _await_copies(pending, results)
        # A hook may raise, so no gradient waits for one.
        for reduction, gradients in zip(pending, staged, strict=True):
            reduction.commit(gradients)
        for reduction, gradients in zip(pending, staged, strict=True):
            reduction.announce(gradients)

    def seal(self) -> None:
        """Declares that the backwards of all reductions so far ended well."""
        self._sealed = len(self._pending)

    def commit_sealed(self) -> None:
        """Commits the reductions of backwards that ended well, and leaves the others."""
        unsealed = self._pending[self._sealed :]
        self._pending = self._pending[: self._sealed]
        self.commit()
        self._pending = unsealed
        self._followed.extend(unsealed)

    def discard(self) -> None:
        """Waits for what was launched, so that nothing is in flight, and forgets all of them."""
        pending, self._pending = self._pending, []
        self._travelling.clear()
        self._followed.clear()
        self._sealed = 0
        for reduction in pending:
            reduction.in_flight.wait()


@dataclass(frozen=True, kw_only=True)
class SharedComm:
    """What all groups of one root communicate through.

    Attributes:
        streams: the named streams.
        queue: the reductions in flight.
        source: where buffers that travel come from.
    """

    streams: CommStreams
    queue: ReductionQueue
    source: BufferSource

    @classmethod
    def of(cls, device: torch.device) -> SharedComm:
        """Returns what a new root on ``device`` communicates through.

        Without streams memory is kept for the next collective: new memory costs page faults there,
        and what an allocator keeps for others elsewhere.
        """
        streams = CommStreams(device)
        source = BufferPool() if streams.asynchronous_work else NewBuffers()
        return cls(streams=streams, queue=ReductionQueue(), source=source)


def _await_copies(pending: Sequence[PendingReduction], results: Sequence[ReducedShards]) -> None:
    """Returns when all gradients that travel home have arrived: one wait for many."""
    ways = {
        (id(param.staging), device): param.staging  # a user's own need not be hashable
        for reduction, result in zip(pending, results, strict=True)
        for device in (result.output.device,)
        for param in reduction.params
    }
    for (_, device), staging in ways.items():
        staging.arrived(device)


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
