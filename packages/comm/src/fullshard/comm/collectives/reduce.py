"""Reducing a list of gradients in one launch.

Owns: the order of pack, reduce-scatter and scaling, on which stream each runs, and what stays alive
meanwhile. What exists only while a reduction runs is in one object, ``ReduceInFlight``. Refuses:
knowing what the tensors are, deciding how they are scaled (see ``scaling``), and accumulating. What
can be wrong with the arguments is raised before any collective is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import allocate_from
from fullshard.comm.buffers.buffers import Buffers
from fullshard.comm.buffers.packing import pack_gradients, scale_tensors
from fullshard.comm.debug.debug import check_layout
from fullshard.comm.layouts import checks, views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime.grad_mode import without_grad
from fullshard.comm.runtime.observer import EventKind, emit, is_observed
from fullshard.comm.runtime.ranges import ranged
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.same_host.shared_signals import PeerLostError
from fullshard.comm.transports.collective import no_work
from fullshard.comm.transports.config import ReduceLane
from fullshard.comm.transports.contribution import Contribution
from fullshard.comm.transports.narrow import few_ranks, narrow_transport_of
from fullshard.comm.transports.transport import NarrowTransport

__all__ = [
    "ReduceInFlight",
    "ReducedShards",
    "foreach_reduce",
]


@dataclass(frozen=True, kw_only=True)
class ReducedShards:
    """What a reduction gives this rank.

    Attributes:
        shards: this rank's shard of each reduced gradient, ``shard_shape(rank)``, in the reduce
            dtype; views of one buffer.
        marks: ``[layout.marks]``, greater than 0 where any rank had a gradient; None if the layout
            has no marks.
        output: the buffer.
    """

    shards: list[torch.Tensor]
    marks: torch.Tensor | None
    output: torch.Tensor

    @classmethod
    def of(cls, output: torch.Tensor, layout: Layout, rank: int) -> ReducedShards:
        """What lies in ``rank``'s slice of the result, ``[slice_numel]``."""
        return cls(
            shards=views.shard_views(output, layout, rank),
            marks=views.own_marks(output, layout) if layout.marks else None,
            output=output,
        )


@dataclass(eq=False)
class ReduceInFlight:
    """A reduction that was issued. ``wait()`` gives its result.

    Attributes:
        layout: where things lie.
        lane: what it was issued with.
        inputs: the packed gradients, and what else of ``lane.source`` an asynchronous collective
            uses, kept until it is over; none after, or where streams keep them.
        given: this rank's slice of the result; None until a collective that asks for it when all
            parts are there has done so.
        lent: what else the collective was given. The same memory as ``output``, since a gradient
            may be a view of the result, and keeps it for longer than any worker thread does; and
            gradients that it reads where they lie. None of it once the collective is over.
        work: the handle of an asynchronous collective, or None.
        event: the end of the reduction on its stream.
    """

    layout: Layout
    lane: ReduceLane
    inputs: tuple[Buffers, ...]
    given: torch.Tensor | None
    lent: tuple[torch.Tensor, ...]
    work: dist.Work | None
    event: StreamEvent
    _result: ReducedShards | None = field(default=None, init=False, repr=False)

    @property
    def ready(self) -> bool:
        """Whether ``wait()`` would not block the host."""
        return self.work is None or bool(self.work.is_completed())

    @property
    def output(self) -> torch.Tensor:
        """This rank's slice of the result, once the collective is over."""
        assert self.given is not None, "the collective is over"
        return self.given

    def allocate(self) -> torch.Tensor:
        """Memory for this rank's slice of the result, asked for once."""
        self.given = _output(self.layout, self.lane)
        return views.alias_of(self.given)

    def advance(self) -> None:
        """Nothing: the collective was launched, and none follows."""

    def land(self) -> None:
        """As ``wait()``, which is all there is to do."""
        self.wait()

    @without_grad
    def wait(self) -> ReducedShards:
        """The reduced shards, usable on the current stream; later calls give the same.

        Without streams it blocks until they are there.
        """
        streams = self.lane.streams
        if self._result is None:
            if self.work is not None:
                try:
                    self.work.wait()
                except PeerLostError as error:
                    error.say_where("reduction", self.lane.name)
                    raise
                scale_tensors(self.output, self.layout, self.lane.scaling.post)
                self.work = None
                tensors, self.lent = list(self.lent), ()
                packed, self.inputs = self.inputs, ()
                for buffers in packed:
                    if not self.lane.source.give_back(buffers):
                        tensors += buffers.drop_views()
                streams.outlive_workers(tensors)
            rank = self.lane.process_group.rank()
            self._result = ReducedShards.of(self.output, self.layout, rank)
        streams.current().wait_event(self.event)
        return self._result


@ranged("post_backward_reduce")
def foreach_reduce(
    gradients: Sequence[torch.Tensor | None],
    layout: Layout,
    lane: ReduceLane,
) -> ReduceInFlight:
    """A reduction in flight, after which each rank holds its shard of every reduced gradient.

    The input is packed on the current stream, so gradients may be freed when this returns; the
    collective and the scaling after it run on the reduce stream, or asynchronously where there are
    no streams. A collective that has a ``parts_reducer`` packs nothing, and reads gradients where
    they lie: nobody writes to them until the reduction is over. By default that is so between CPU
    ranks of one host.

    Args:
        gradients: the full gradient of each tensor, ``layout.specs[i].shape``, any dtype, or None
            for a slot of zeros.
        layout: where things lie: one buffer of one floating-point dtype, in which the reduction
            happens. With ``layout.marks == len(gradients)``, mark ``i`` tells whether any rank had
            gradient ``i``.
        lane: collective, ranks, streams, scaling.

    Raises:
        ValueError: if gradients do not fit the layout or the device, or the layout does not fit the
            process group.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same collective.
    """
    rank = checks.check_world(layout, lane.process_group, lane.name)
    checks.check_gradients(gradients, layout, lane.device, lane.name)
    check_layout(EventKind.REDUCE_SCATTER, lane.name, layout, lane.process_group, lane.scaling)
    in_parts = _reduce_parts(gradients, layout, lane)
    if in_parts is not None:
        return in_parts
    narrow = narrow_transport_of(layout, lane.comm, lane.process_group, lane.device, reduces=True)
    if narrow is not None:
        return _reduce_narrow(gradients, layout, lane, narrow)
    streams = lane.streams
    owner = streams.current()
    streams.collect(owner, keep=lane.inputs_in_flight - 1)  # those travel while one is packed
    buffers = lane.source.take(lane.comm, layout, rank, lane.device)
    pack_gradients(buffers, gradients, lane.scaling)
    packed = streams.record(owner)
    (packed_in,) = buffers.tensors
    if is_observed():
        emit(EventKind.COPY_IN, lane.name, rank=rank, nbytes=packed_in.nbytes, stream="current")
    with streams.use(streams.reduce):
        streams.reduce.wait_event(packed)
        output = _output(layout, lane)
        lent = views.alias_of(output)
        work = _reduce_scatter(lent, packed_in, lane, rank)
        if work is not None and not streams.asynchronous_work:
            work.wait()  # makes the reduce stream wait, not the host
            work = None
        if work is None:
            scale_tensors(output, layout, lane.scaling.post)
        event = streams.record(streams.reduce)
    if work is not None:
        return ReduceInFlight(layout, lane, (buffers,), output, (lent,), work, event)
    if not lane.source.give_back(buffers):
        streams.retire((packed_in,), owner, event)
    return ReduceInFlight(layout, lane, (), output, (), None, event)


def _reduce_parts(
    gradients: Sequence[torch.Tensor | None],
    layout: Layout,
    lane: ReduceLane,
) -> ReduceInFlight | None:
    """The reduction in flight, if the collective takes gradients as they lie; else None."""
    finder, buffer = getattr(lane.comm, "parts_reducer", None), layout.buffers[0]
    reducer = None
    if finder is not None and buffer.slice_numel:
        reducer = finder(lane.process_group, lane.device, lane.scaling.op)
    if reducer is None:
        return None
    rank = lane.process_group.rank()
    given = Contribution(gradients, layout, rank, lane.scaling)
    event = lane.streams.record(lane.streams.reduce)
    flight = ReduceInFlight(layout, lane, (), None, (), None, event)
    try:
        flight.work = reducer.reduce_parts(
            flight.allocate, given, lane.process_group, lane.scaling.op
        )
    except PeerLostError as error:
        error.say_where("reduction", lane.name)
        raise
    if flight.work is None:
        return None
    if is_observed():
        nbytes = buffer.slice_nbytes * layout.world_size
        emit(EventKind.COPY_IN, lane.name, rank=rank, nbytes=nbytes, stream="current")
        emit(EventKind.REDUCE_SCATTER, lane.name, rank=rank, nbytes=nbytes, stream="reduce")
    flight.event = lane.streams.record(lane.streams.reduce)
    return flight


def _reduce_narrow(
    gradients: Sequence[torch.Tensor | None],
    layout: Layout,
    lane: ReduceLane,
    transport: NarrowTransport,
) -> ReduceInFlight:
    """The reduction in flight to the few ranks that get a part; see [Note: narrow collectives].

    It is for devices without streams.
    """
    process_group, streams = lane.process_group, lane.streams
    rank = process_group.rank()
    buffers = lane.source.take(lane.comm, layout, rank, lane.device, few_ranks(layout))
    pack_gradients(buffers, gradients, lane.scaling)
    (packed,) = buffers.tensors
    marks = buffers.marks[0].clone()  # which every rank asks for
    buffers.forget()  # what the collective leaves there may be anything
    emit(EventKind.COPY_IN, lane.name, rank=rank, nbytes=packed.nbytes, stream="current")
    output = _output(layout, lane)
    emit(EventKind.REDUCE_SCATTER, lane.name, rank=rank, nbytes=packed.nbytes, stream="reduce")
    with streams.launching():
        works = transport.reduce_scatter_narrow(
            buffers.all_slices, marks, process_group, lane.scaling.op, True
        )

    def land() -> None:
        if rank < buffers.ranks:
            output.copy_(buffers.slices[0])
        else:
            views.own_marks(output, layout).copy_(marks)

    work, lent = SeveralWorks(works, land), (marks, *buffers.all_slices)
    event = streams.record(streams.reduce)
    return ReduceInFlight(layout, lane, (buffers,), output, lent, work, event)


def _output(layout: Layout, lane: ReduceLane) -> torch.Tensor:
    """Memory for this rank's slice of the result."""
    spec = layout.buffers[0]
    return allocate_from(lane.comm, spec.slice_numel, spec.dtype, lane.device)


def _reduce_scatter(
    output: torch.Tensor, packed: torch.Tensor, lane: ReduceLane, rank: int
) -> dist.Work | None:
    if packed.numel() == 0:
        return None  # the same on all ranks, so nobody waits for it
    emit(EventKind.REDUCE_SCATTER, lane.name, rank=rank, nbytes=packed.nbytes, stream="reduce")
    with lane.streams.launching():
        try:
            work = lane.comm(
                output_tensor=output,
                input_tensor=packed,
                group=lane.process_group,
                op=lane.scaling.op,
                async_op=lane.streams.asynchronous_work,
            )
        except PeerLostError as error:
            error.say_where("reduction", lane.name)
            raise
    if work is not None and not hasattr(work, "wait"):
        raise no_work(lane.comm, work)
    return work
