"""Reductions, from their launch until the sharded gradients are in place.

Owns how a group reduces (``ReductionSetup``) and the queue of a root: the limit of concurrent
reductions, and the commit at the end of backward. At most one device-to-host copy shows which
parameters any rank used. [Note: whose gradients] What a reduction gives becomes ``.grad`` and
belongs to the user from then on: no later reduction fills that memory again, and
``zero_grad(set_to_none=True)`` frees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, islice, repeat
from operator import is_not
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import (
    BufferPool,
    CommStreams,
    EventKind,
    Layout,
    ReduceConfig,
    ReducedShards,
    ReduceScaling,
    ReduceScatter,
)
from fullshard.comm.spi import (
    LISTENERS,
    BufferSource,
    emit,
    host_values,
    traits_of,
)
from fullshard.sharding.base.compat import (
    hooks_after_accumulation,
    local_shard,
    make_dtensor,
    without_torch_function,
)
from fullshard.sharding.base.policies import declares
from fullshard.sharding.params.lost_data import NotedStorage
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.protocols import GradientOffload, Offload, WireForms
from fullshard.sharding.reduce.strategies import Gradients, InFlight, Launch, PlainReduce

__all__ = ["ReadyReductions", "ReduceSettings", "ReductionQueue", "ReductionSetup", "RootComm"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReduceSettings:
    """A user's settings for the reductions of a group.

    Attributes:
        comm: the collective; None: the default one.
        process_group: the ranks of the mesh's shard axis.
        divide_factor: what divides the sum, or a tensor that holds it then; None: the world size.
        force_sum: whether the backend is asked for sums only.
        inputs_in_flight: how many reductions travel at once, and so how many packed inputs.
        zero_unused: whether a parameter that no rank used gets zeros instead of no gradient.
        cap_mb: MiB of small reductions that may share a launch; 0: each has its own.
        hook: called with each reduced buffer.
        hook_stream: to call it on; None: the all-reduce stream.
    """

    comm: ReduceScatter | None = None
    process_group: dist.ProcessGroup
    divide_factor: float | torch.Tensor | None = None
    force_sum: bool = False
    inputs_in_flight: int = 1  # as in torch: two took as long a step, and more memory
    zero_unused: bool = False
    cap_mb: float
    hook: Callable[[torch.Tensor], None] | None = None
    hook_stream: Any = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ReductionSetup:
    """How a group, or several at once, reduce; made once, and kept while the settings stay.

    Attributes:
        names: of the groups, for events.
        rank: this rank, for events.
        indices: which of its group's parameters it carries.
        params: the parameters, in the order of the layout.
        layout: their positions, and the used-parameter mask behind them.
        config: what comm is given.
        wire: who knows in what form gradients travel.
        scaling: how it is scaled, what follows the reduce-scatter counted in.
        strategy: how it is launched, and what follows; see [Note: reduce strategies].
        settings: what the user set.
        coalesces: whether it may share a launch with its neighbours'.
    """

    names: tuple[str, ...]
    rank: int
    indices: tuple[int, ...]
    params: tuple[FSDPParam, ...]
    layout: Layout
    config: ReduceConfig
    wire: WireForms
    scaling: ReduceScaling
    strategy: PlainReduce
    settings: ReduceSettings
    coalesces: bool

    @cached_property
    def launch(self) -> Launch:
        """The function that launches it: by default ``ReducePlan.launch``; see ``launch_of``."""
        forms = [param.grad_sent for param in self.params]
        plan = self.wire.reduction(self.layout, forms, self.config)
        return self.strategy.launch_of(plan, self.params, self.scaling)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that travel, with padding: the slices of all ranks."""
        return self.layout.buffer.slice_nbytes * self.layout.world_size

    @cached_property
    def offloads(self) -> dict[int, Offload]:
        """The policies that bring gradients home, by id: a user's own need not be hashable."""
        policies = [param.offload for param in self.params]
        return {id(each): each for each in policies if not declares(each, "stages_out_nothing")}

    @cached_property
    def stores_gradients(self) -> bool:
        """Whether a policy of them stores gradients; see ``GradientOffload``."""
        return any(declares(each, "stores_gradients") for each in self.offloads.values())


ReadyReductions = Sequence[tuple[ReductionSetup, Gradients]]
"""Reductions that are to be launched now, and the full gradients on their way into each."""

# -- the queue ------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True, slots=True)
class _LaunchedReduction:
    """A reduction that was launched.

    Attributes:
        setup: what it carries.
        in_flight: the reduce-scatter, with what follows it; None: its result is staged.
        gives_gradients: whether it gives gradients; else they are kept for a later one.
        used_here: whether this rank had a gradient for each, if it lacked one, so that the
            used-parameter mask has to be read.
        calls_hook: whether the user's function of the reduced buffer is still to be called.
        staged: the parameters that some rank used, and what becomes their gradients.
    """

    setup: ReductionSetup
    in_flight: InFlight | None
    gives_gradients: bool
    used_here: Sequence[bool] | None
    calls_hook: bool
    staged: list[tuple[FSDPParam, torch.Tensor]] = field(default_factory=list)

    def store_early(self) -> None:
        """Stage the result out and free its memory, for a policy that stores gradients.

        A result with a user's hook waits for the end of backward. So does a result of which this
        rank lacked a gradient: the host must read the used-parameter mask first.
        """
        waits = self.used_here is not None or self.setup.settings.hook is not None
        if self.in_flight is not None and not waits:
            self.stage_out(self.in_flight.wait(), None)

    def stage_out(self, result: ReducedShards, used: Sequence[bool] | None) -> None:
        """Begin to bring the gradients of the ``used`` parameters where they live; None: all."""
        staged = []
        given = zip(self.setup.params, result.shards, strict=True) if self.gives_gradients else ()
        for param, shard in given if used is None else compress(given, used):
            if shard.dtype is not param.lands_in:
                shard = param.stage_gradient(shard)
            staged.append((param, shard))
        self.staged, self.in_flight = staged, None

    def commit(self) -> list[nn.Parameter]:
        """Add what ``stage_out`` brought to the sharded gradients; the first becomes them.

        Returns the parameters with hooks to call after accumulation.
        """
        hooked_params, staged, self.staged = [], self.staged, []
        with without_torch_function():
            for param, gradient in staged:
                sharded = param.sharded
                present = sharded.grad
                if present is None:
                    made: Any = make_dtensor(gradient, param.spec)
                    made.noted_storage = NotedStorage((made.untyped_storage(),))
                    sharded.grad = made
                elif self.setup.stores_gradients and declares(param.offload, "stores_gradients"):
                    store = cast(GradientOffload, param.offload)
                    store.accumulate(local_shard(present), gradient)
                else:
                    local_shard(present).add_(gradient)
                if hooks_after_accumulation(sharded):
                    hooked_params.append(sharded)
        return hooked_params


class ReductionQueue:
    """The reductions of one root, in launch order."""

    def __init__(self) -> None:
        """Start empty."""
        self._pending: list[_LaunchedReduction] = []
        self._travelling: deque[_LaunchedReduction] = deque()  # those that are not over
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
                oldest = self._travelling.popleft()
                if oldest.in_flight is not None:
                    oldest.in_flight.finish()
                if oldest.setup.stores_gradients:
                    oldest.store_early()
            used_here = list(map(is_not, gradients, repeat(None)))
            reduction = _LaunchedReduction(
                setup=setup,
                in_flight=setup.launch(gradients),
                gives_gradients=setup.strategy.gives_gradients,
                used_here=None if setup.settings.zero_unused or all(used_here) else used_here,
                calls_hook=setup.settings.hook is not None and setup.strategy.gives_gradients,
            )
            self._pending.append(reduction)
            self._travelling.append(reduction)

    def launch_second(self) -> None:
        """Launch what follows the reduce-scatters, before the first is waited for.

        Without streams an all-reduce is launched when its reduce-scatter is over. A plain reduction
        has nothing to launch: ``commit`` is the only wait for it, on every device.
        """
        for reduction in self._pending:
            if reduction.setup.strategy.has_second_reduction and reduction.in_flight is not None:
                reduction.in_flight.finish()

    def commit(self, check: Callable[[], None] | None = None) -> None:
        """Wait for all of them and put the sharded gradients in place.

        Args:
            check: called when they are in place, before hooks see them; it may raise.
        """
        try:
            self._stage_all()
        except Exception:  # but an interrupt leaves gradients of backwards that ended to ``reset``
            self._pending, self._sealed = [], 0
            raise
        pending, self._pending, self._sealed = self._pending, [], 0
        committed = list(map(_LaunchedReduction.commit, pending))
        if check is not None:
            check()
        for reduction, params in zip(pending, committed, strict=True):
            for param in params:  # a hook may raise, so no gradient waits for it
                for hook in list(hooks_after_accumulation(param).values()):
                    hook(param)
            for name in reduction.setup.names if reduction.gives_gradients and LISTENERS else ():
                emit(EventKind.REDUCE_DONE, name, rank=reduction.setup.rank)

    def _stage_all(self) -> None:
        """Wait for all of them and bring the gradients home; a second call does what is left."""
        self.launch_second()
        pending = self._pending
        self._travelling.clear()
        waiting, lacking = list[tuple[_LaunchedReduction, ReducedShards]](), False
        for reduction in pending:
            if reduction.in_flight is None:
                continue
            result = reduction.in_flight.wait()
            if reduction.calls_hook:
                reduction.calls_hook = False
                _call_hook(reduction.setup, result.output)
            waiting.append((reduction, result))
            lacking |= reduction.used_here is not None
        masks = _read_masks(waiting) if lacking else repeat(None)
        for (reduction, result), used in zip(waiting, masks, strict=False):
            reduction.stage_out(result, used)
        offloads = {}  # one wait for many gradients that travel home
        for reduction in pending:
            for key, offload in reduction.setup.offloads.items():
                offloads[key, reduction.setup.config.device] = offload
        for (_, device), offload in offloads.items():
            offload.arrived(device)

    def store_early(self) -> None:
        """Stage out the results that go to policies that store gradients."""
        for reduction in self._pending:
            if reduction.setup.stores_gradients:
                reduction.store_early()

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
            if reduction.in_flight is not None:
                reduction.in_flight.discard()


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


def _read_masks(
    reductions: Sequence[tuple[_LaunchedReduction, ReducedShards]],
) -> list[Sequence[bool] | None]:
    """Return, per reduction, which parameters any rank had a gradient for, by one host copy.

    None: all parameters, as this rank had a gradient for each.
    """
    lacking = [(each.used_here, result.mask) for each, result in reductions if each.used_here]
    masks = [mask for _, mask in lacking if mask is not None]
    assert len(masks) == len(lacking), "every reduction of a group carries the mask"
    alike = [used for used_here, _ in lacking for used in used_here]
    flat = iter(host_values(torch.cat([mask > 0 for mask in masks]), alike))
    used_here = [each.used_here for each, _ in reductions]
    return [None if here is None else list(islice(flat, len(here))) for here in used_here]


@torch.no_grad()
def _call_hook(setup: ReductionSetup, output: torch.Tensor) -> None:
    """Call the user's function of a reduced buffer, on its stream."""
    settings, streams = setup.settings, setup.config.streams
    assert settings.hook is not None, "there is one"
    stream = streams.all_reduce if settings.hook_stream is None else settings.hook_stream
    stream.wait_event(streams.record())
    with streams.use(stream):
        settings.hook(output)
        done = streams.record(stream)
    streams.current().wait_event(done)
