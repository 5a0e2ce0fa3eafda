"""Reductions in flight, from their launch until the sharded gradients are in place.

Owns the queue of a root: how many may run at once, and the commit at the end of backward, where one
device-to-host copy at most tells which parameters any rank used. [Note: whose gradients] What a
reduction gives becomes ``.grad`` and belongs to the user from then on: no later reduction fills
that memory again, and ``zero_grad(set_to_none=True)`` frees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullshard.comm import BufferPool, CommStreams, EventKind, ReducedShards
from fullshard.comm.buffers.buffers import BufferSource, NewBuffers
from fullshard.comm.runtime.observer import emit
from fullshard.sharding.base.compat import (
    call_post_accumulate_grad_hooks,
    local_shard,
    make_dtensors,
)
from fullshard.sharding.reduce.strategies import Gradients, InFlight, ReductionSetup

__all__ = ["PendingReduction", "ReductionQueue", "SharedComm"]


@dataclass(kw_only=True, slots=True)
class PendingReduction:
    """A reduction that was launched.

    Attributes:
        setup: what it carries.
        in_flight: what its strategy returned.
        complete: whether it gives gradients; else they are kept for a later one.
        lacks_gradient: whether this rank had no gradient for one of them, so that the
            used-parameter mask has to be read.
        staged: per parameter, what becomes its gradient; None where no rank used it.
        given: the sharded parameters that got one.
    """

    setup: ReductionSetup
    in_flight: InFlight
    complete: bool
    lacks_gradient: bool
    staged: Sequence[torch.Tensor | None] = ()
    given: Sequence[nn.Parameter] = ()

    def stage_out(self, result: ReducedShards, used: Sequence[bool] | None) -> None:
        """Begins to bring the gradients of the ``used`` parameters where they live; None: all."""
        staged: list[torch.Tensor | None] = []
        params = self.setup.params if self.complete else ()
        for index, (param, shard) in enumerate(zip(params, result.shards, strict=self.complete)):
            if used is not None and not used[index]:
                staged.append(None)
            elif shard.dtype is param.lands_in:
                staged.append(shard)
            else:
                staged.append(param.stage_gradient(shard))
        self.staged = staged

    def commit(self) -> None:
        """Adds what ``stage_out`` brought to the sharded gradients; the first becomes them."""
        given, fresh, specs, gradients = [], [], [], []
        for param, gradient in zip(self.setup.params, self.staged, strict=self.complete):
            if gradient is None:
                continue
            given.append(param.sharded)
            present = param.sharded.grad
            if present is None:
                fresh.append(param.sharded)
                specs.append(param.spec)
                gradients.append(gradient)
            else:
                local_shard(present).add_(gradient)
        for sharded, made in zip(fresh, make_dtensors(gradients, specs), strict=True):
            sharded.grad = made
        self.given = given

    def announce(self) -> None:
        """Calls the user's hooks on the parameters that got a gradient."""
        call_post_accumulate_grad_hooks(self.given)
        for name in self.setup.names if self.complete else ():
            emit(EventKind.REDUCE_DONE, name, rank=self.setup.rank)


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

    def launch(self, setup: ReductionSetup, gradients: Gradients) -> None:
        """Launches a reduction once there is room, and then what follows those before it."""
        while len(self._travelling) >= setup.config.inputs_in_flight:
            self._travelling.popleft().in_flight.land()
        lacks_gradient = False
        for gradient in gradients:
            if gradient is None and not setup.zero_unused:
                lacks_gradient = True
        reduction = PendingReduction(
            setup=setup,
            in_flight=setup.strategy.launch(setup, gradients),
            complete=setup.strategy.complete,
            lacks_gradient=lacks_gradient,
        )
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
        masks = dict(zip(lacking, _read_masks([results[i] for i in lacking]), strict=True))
        for i, reduction in enumerate(pending):
            reduction.stage_out(results[i], masks.get(i))
        _await_copies(pending, results)
        for reduction in pending:
            reduction.commit()
        for reduction in pending:  # a hook may raise, so no gradient waits for one
            reduction.announce()

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
        (id(param.offload), device): param.offload  # a user's own need not be hashable
        for reduction, result in zip(pending, results, strict=True)
        for device in (result.output.device,)
        for param in reduction.setup.params
    }
    for (_, device), offload in ways.items():
        offload.arrived(device)


def _read_masks(results: Sequence[ReducedShards]) -> list[list[bool]]:
    """Returns, per reduction, which parameters any rank had a gradient for: one host copy."""
    tensors = [result.marks for result in results if result.marks is not None]
    assert len(tensors) == len(results), "every reduction of a group carries the mask"
    if not tensors:
        return []
    flat = torch.cat([mask > 0 for mask in tensors]).tolist()
    used, start = [], 0
    for mask in tensors:
        used.append(flat[start : start + mask.numel()])
        start += mask.numel()
    return used
