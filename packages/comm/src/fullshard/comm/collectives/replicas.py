"""What follows a reduce-scatter on a mesh of two axes: the second half of a reduction.

Owns: the all-reduce over replicas of a shard, or the reduce-scatter that cuts a shard again, on a
stream of its own; and partial results that wait for a later reduction. Refuses: knowing a mesh,
deciding when to skip, and choosing who moves the bytes (see ``default_transport``).

[Note: order of all-reduces] What follows no handle (on a device with streams, or where a rank
shards alone) is launched at once. Otherwise a rank cannot launch an all-reduce before its
reduce-scatter is complete, and this happens at a different time on each rank. Nevertheless all
launch it at the same place among their other collectives: when the reduction has to land, be it
over or not. A launch may wait for the other ranks (those that share memory map a larger segment
together): were a rank to wait so for its replica, the replica for a rank that shards with it in the
next reduce-scatter, and that one for its own replica, none would ever come. It happened.

Between two hosts an exchange of whole shards (see ``exchange``) was tried instead of gloo's own
all-reduce: a step of gpt-mini over 1 Gbit/s took 167 and 169 ms, with gloo's 160 and 162.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm.collectives.lost_ranks import raise_located, wait_for
from fullshard.comm.collectives.reduce import ReducedShards, ReduceInFlight, ReducePlan
from fullshard.comm.layouts import checks
from fullshard.comm.layouts.scaling import ReduceScaling
from fullshard.comm.runtime.compat import without_grad
from fullshard.comm.runtime.observer import CHECKS, EventKind, emit
from fullshard.comm.transports.default import default_transport

__all__ = ["AllReduceInFlight", "SecondReduceInFlight", "all_reduce_shards"]


@dataclass(eq=False)
class AllReduceInFlight:
    """A reduction whose result is then all-reduced; used as a ``ReduceInFlight``."""

    _reduction: ReduceInFlight
    _process_group: dist.ProcessGroup
    _scaling: ReduceScaling
    _partial: torch.Tensor | None
    _work: dist.Work | None = None
    _launched: bool = False

    def __post_init__(self) -> None:
        """Launch the all-reduce at once if there is no handle; see [Note: order of all-reduces]."""
        self._event = self._reduction.event
        if self._reduction.work is None:
            self._launch()

    @without_grad
    def _launch(self) -> None:
        output, plan, group = self._reduction.output, self._reduction.plan, self._process_group
        config, scaling, streams = plan.config, self._scaling, plan.config.streams
        rank, nbytes = group.rank(), output.nbytes
        if CHECKS:
            checks.check_launch(EventKind.ALL_REDUCE, config.name, plan.layout, group, scaling)
        with streams.use(streams.all_reduce):
            streams.all_reduce.wait_event(self._reduction.event)
            if self._partial is not None:
                output.add_(self._partial)
            if output.numel():
                name = config.name
                emit(EventKind.ALL_REDUCE, name, rank=rank, nbytes=nbytes, stream="all_reduce")
                try:
                    self._work = default_transport(group).all_reduce(
                        output, scaling.op, group, streams.asynchronous_work
                    )
                except RuntimeError as error:
                    raise_located(error, config.what, name, group)
            if self._work is None:
                self._scale()
            self._event = streams.record(streams.all_reduce)
        self._launched = True

    def _scale(self) -> None:
        reduction, scaling = self._reduction, self._scaling
        if scaling.scales_after:
            reduction.output[: reduction.plan.mask.start].mul_(scaling.post)

    def launch_second(self) -> None:
        """Blocks until the reduce-scatter is done, and launches the all-reduce if it was not."""
        self._reduction.wait()
        if not self._launched:
            self._launch()

    def discard(self) -> None:
        """Wait for launched work, and launch nothing more: failed replicas would not join."""
        flight = self if self._launched else self._reduction
        flight.wait()

    @without_grad
    def wait(self) -> ReducedShards:
        """The shards, reduced over all ranks, usable on the current stream; later calls too."""
        self.launch_second()
        streams = self._reduction.plan.config.streams
        if self._work is not None:
            wait_for(self._reduction.plan.config, self._work)
            self._scale()
            self._work = None
        shards = self._reduction.wait()
        streams.current().wait_event(self._event)
        self._partial = None
        return shards


class SecondReduceInFlight(AllReduceInFlight):
    """A reduction whose result is then reduce-scattered; used as a ``ReduceInFlight``."""

    def __init__(
        self,
        reduction: ReduceInFlight,
        plan: ReducePlan,
        second_of: Callable[[list[torch.Tensor]], list[torch.Tensor | None]],
        partial: torch.Tensor | None = None,
    ) -> None:
        """Launch the second reduction at once if the first has no handle.

        Args:
            reduction: from ``foreach_reduce``, with a scaling whose ``post`` is 1.
            plan: of the second reduction. Its last tensor is the used-parameter mask of the first
                as rows, ``[ranks, mask_numel]``, cut on dim 0: each rank gets the sum.
            second_of: makes the other tensors of ``plan`` of the shards of the first reduction.
            partial: as for ``all_reduce_shards``.
        """
        self._plan = plan
        self._second_of = second_of
        self._second: ReduceInFlight | None = None
        super().__init__(
            reduction, plan.config.process_group, reduction.plan.config.scaling, partial
        )

    @without_grad
    def _launch(self) -> None:
        first, streams = self._reduction.plan, self._reduction.plan.config.streams
        output = self._reduction.output
        with streams.use(streams.all_reduce):
            streams.all_reduce.wait_event(self._reduction.event)
            if self._partial is not None:
                output.add_(self._partial)
            given = first.shards_in(output)
            assert given.mask is not None, "every reduction of a group carries the mask"
            rows = given.mask.expand(self._plan.layout.world_size, -1)
            self._second = self._plan.launch([*self._second_of(given.shards), rows])
        self._launched = True

    @without_grad
    def wait(self) -> ReducedShards:
        """The shards, reduced over all ranks, usable on the current stream; later calls too."""
        self.launch_second()
        assert self._second is not None, "it was launched"
        reduced = self._second.wait()
        self._partial = None
        return ReducedShards(
            shards=reduced.shards[:-1], mask=reduced.shards[-1].view(-1), output=reduced.output
        )


def all_reduce_shards(
    reduction: ReduceInFlight,
    process_group: dist.ProcessGroup,
    scaling: ReduceScaling,
    partial: torch.Tensor | None = None,
) -> AllReduceInFlight:
    """A reduction in flight whose result is summed over replicas.

    Args:
        reduction: from ``foreach_reduce``, with a scaling whose ``post`` is 1.
        process_group: the ranks that hold copies of this shard.
        scaling: of the whole; its ``post`` is applied after the all-reduce.
        partial: what earlier reductions left unreduced over replicas, ``[slice_numel]``; it is
            added before the all-reduce.

    Raises:
        ValueError: if the reduction has scaled its result already, or ``partial`` is of another
            size.
    """
    plan = reduction.plan
    if plan.config.scaling.scales_after:
        raise ValueError(
            f"the reduction of {plan.config.name or 'these tensors'} scales its result by "
            f"{plan.config.scaling.post}; reduce with post=1.0, the all-reduce scales"
        )
    result = (plan.layout.buffer.slice_numel,)
    if partial is not None and partial.shape != result:
        raise ValueError(
            f"partial has shape {tuple(partial.shape)}, the reduction gives "
            f"{result}; keep partial results per layout"
        )
    return AllReduceInFlight(reduction, process_group, scaling, partial)
