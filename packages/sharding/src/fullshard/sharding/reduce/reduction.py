"""The queue of a root: its reductions from their launch until the gradients are in place.

Owns the limit of concurrent reductions, and the commit at the end of backward. At most one
device-to-host copy shows which parameters any rank used. ``launched`` has what happens to one
result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from operator import is_not

import torch

from fullshard.comm import BufferPool, CommStreams, EventKind
from fullshard.comm.spi import LISTENERS, BufferSource, emit, host_values, traits_of
from fullshard.sharding.base.compat import hooks_after_accumulation
from fullshard.sharding.reduce.launched import LaunchedReduction
from fullshard.sharding.reduce.strategies import ReadyReductions

__all__ = ["ReductionQueue", "RootComm"]


class ReductionQueue:
    """The reductions of one root, in launch order."""

    def __init__(self) -> None:
        """Start empty."""
        self._pending: list[LaunchedReduction] = []
        self._travelling: deque[LaunchedReduction] = deque()  # those that are not over
        self._sealed = 0

    def __len__(self) -> int:
        """Return how many were launched and not committed."""
        return len(self._pending)

    def launch(self, ready: ReadyReductions) -> None:
        """Launch reductions, each once there is room."""
        for setup, gradients in ready:
            for name in setup.names if LISTENERS else ():
                emit(EventKind.REDUCE, name, rank=setup.rank)
            while len(self._travelling) >= setup.config.inputs_in_flight:
                self._travelling.popleft().make_room()
            used_here = list(map(is_not, gradients, repeat(None)))
            reduction = LaunchedReduction(
                setup=setup,
                in_flight=setup.strategy.launch(setup, gradients),
                gives_gradients=setup.strategy.gives_gradients,
                used_here=None if setup.settings.zero_unused or all(used_here) else used_here,
                calls_hook=setup.settings.hook is not None and setup.strategy.gives_gradients,
            )
            self._pending.append(reduction)
            self._travelling.append(reduction)
            if setup.lands_at_once:
                reduction.land()

    def launch_second(self) -> None:
        """Launch what follows the reduce-scatters, before the first is waited for.

        Without streams an all-reduce is launched when its reduce-scatter is over. A plain reduction
        has nothing to launch: ``commit`` is the only wait for it, on every device.
        """
        for reduction in self._pending:
            if reduction.setup.strategy.has_second_reduction and reduction.in_flight is not None:
                reduction.in_flight.launch_second()

    def land(self) -> None:
        """Wait for all of them, and bring the results where they belong."""
        self.launch_second()
        self._travelling.clear()
        for reduction in self._pending:
            reduction.land()

    def commit(self, check: Callable[[], None] | None = None) -> None:
        """Wait for all of them and put the sharded gradients in place.

        Args:
            check: called when they are in place, before hooks see them; it may raise.
        """
        try:
            self.land()
            masks = self._await_landed()
        except Exception:  # but an interrupt leaves gradients of backwards that ended to ``reset``
            self._pending, self._sealed = [], 0
            raise
        pending, self._pending, self._sealed = self._pending, [], 0
        committed = list(map(LaunchedReduction.commit, pending, masks))
        if check is not None:
            check()
        for reduction, params in zip(pending, committed, strict=True):
            for param in params:  # a hook may raise, so no gradient waits for it
                for hook in list(hooks_after_accumulation(param).values()):
                    hook(param)
            for name in reduction.setup.names if reduction.gives_gradients and LISTENERS else ():
                emit(EventKind.REDUCE_DONE, name, rank=reduction.setup.rank)

    def _await_landed(self) -> Iterable[Sequence[bool] | None]:
        """Wait for what landed, and return which parameters of each any rank used."""
        offloads = {}  # one wait for many gradients that travel home
        for reduction in self._pending:
            reduction.wait()
            for key, offload in reduction.setup.offloads.items():
                offloads[key, reduction.setup.config.device] = offload
        for (_, device), offload in offloads.items():
            offload.arrived(device)
        lacking = [each for each in self._pending if each.mask is not None]
        return _used_params(self._pending, lacking) if lacking else repeat(None)

    def seal(self) -> None:
        """Declare that the backwards of all reductions so far ended well."""
        self._sealed = len(self._pending)

    def commit_sealed(self) -> None:
        """Commit the reductions of backwards that ended well, and leave the others."""
        if not self._sealed:
            return
        unsealed = self._pending[self._sealed :]
        self._pending = self._pending[: self._sealed]
        try:
            self.commit()
        finally:
            self._pending += unsealed

    def discard(self) -> None:
        """Wait for all launched reductions, and discard their results."""
        pending, self._pending, self._sealed = self._pending, [], 0
        self._travelling.clear()
        for reduction in pending:
            reduction.discard()


@dataclass(frozen=True, kw_only=True, eq=False)
class RootComm:
    """The streams, queue and buffers that all groups of one root share.

    Attributes:
        streams: the named streams.
        queue: the reductions in flight.
        source: where buffers that travel come from.
    """

    streams: CommStreams
    queue: ReductionQueue
    source: BufferSource

    @classmethod
    def of(cls, device: torch.device) -> RootComm:
        """Return what a new root on ``device`` communicates through.

        The host's memory is kept for the next collective: new memory costs page faults there. A
        device has an allocator that keeps memory for all.
        """
        streams = CommStreams(device)
        source = BufferSource() if traits_of(device).queued else BufferPool()
        return cls(streams=streams, queue=ReductionQueue(), source=source)


def _used_params(
    reductions: Sequence[LaunchedReduction], lacking: Sequence[LaunchedReduction]
) -> list[Sequence[bool] | None]:
    """Return, per reduction, which parameters any rank had a gradient for, by one host copy.

    None: all parameters, as this rank had a gradient for each; it lacked some in ``lacking``.
    """
    masks = [each.mask for each in lacking if each.mask is not None]
    alike = [used for each in lacking for used in each.used_here or ()]
    flat = iter(host_values(torch.cat(masks), alike))
    return [
        None if each.mask is None else list(islice(flat, len(each.setup.params)))
        for each in reductions
    ]
