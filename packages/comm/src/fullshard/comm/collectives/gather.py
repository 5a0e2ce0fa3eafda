"""Gathering a list of shards in one launch.

Owns: the order of pack, all-gather and unpack, on which stream each runs, and what stays alive
meanwhile. What exists only while a gather runs is in one object, ``AllGatherInFlight``. Refuses:
knowing what the tensors are, where full tensors are kept, and when to gather: the caller does. What
can be wrong with the arguments is raised before any collective is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import Buffers
from fullshard.comm.debug.debug import check_layout
from fullshard.comm.layouts import checks, views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.grad_mode import without_grad
from fullshard.comm.runtime.observer import EventKind, emit, is_observed
from fullshard.comm.runtime.ranges import ranged
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.comm.same_host.shared_signals import PeerLostError
from fullshard.comm.transports.collective import no_work
from fullshard.comm.transports.config import GatherLane
from fullshard.comm.transports.narrow import few_ranks, narrow_transport_of
from fullshard.comm.transports.transport import NarrowTransport

__all__ = [
    "AllGatherInFlight",
    "FullTensors",
    "OwnShards",
    "foreach_all_gather",
    "foreach_all_gather_copy_out",
    "foreach_all_gather_discard",
]


@dataclass(eq=False)
class AllGatherInFlight:
    """A gather that was issued: its buffers, and what to wait for.

    Claim it once, by copy-out or by discard.

    Attributes:
        layout: where things lie in ``buffers``.
        lane: what it was issued with.
        buffers: the gathered buffers; None once claimed.
        works: handles of collectives that were issued asynchronously.
        event: the end of the gather on its stream.
        sources: what the packing reads; kept until it has.
    """

    layout: Layout
    lane: GatherLane
    buffers: Buffers | None
    works: tuple[dist.Work, ...]
    event: StreamEvent
    sources: tuple[torch.Tensor, ...]

    @property
    def work(self) -> dist.Work | None:
        """The handle of the last asynchronous collective, or None."""
        return self.works[-1] if self.works else None

    @without_grad
    def wait(self) -> None:
        """Make the gathered buffers usable on the current stream. May be called again.

        Without streams it blocks until the bytes are there.
        """
        streams = self.lane.streams
        if self.works:
            # A work's wait() may decode, in memory that belongs to the gather stream.
            with streams.use(streams.gather):
                try:
                    for work in self.works:
                        work.wait()
                except PeerLostError as error:
                    error.say_where("gather", self.lane.name)
                    raise
                self.event = streams.record(streams.gather)
            self.works = ()
        streams.current().wait_event(self.event)
        self.sources = ()

    def take(self) -> Buffers:
        """The buffers, which from now on are the caller's to give back.

        Raises:
            RuntimeError: if the gather was claimed before.
        """
        if self.buffers is None:
            raise RuntimeError(
                f"the gather of {self.lane.name or 'these tensors'} was already copied out or "
                "discarded; issue a new one with foreach_all_gather."
            )
        buffers, self.buffers = self.buffers, None
        return buffers

    def discard(self) -> None:
        """Wait for a gather that nobody claimed, and let its buffers go.

        Raises:
            RuntimeError: if the gather was claimed before.
        """
        buffers = self.take()
        self.wait()
        _give_back(buffers, self.lane)


class OwnShards:
    """This rank's shards, which gathers of one layout send again and again: checked once.

    Attributes:
        layout: where they will lie.
        tensors: all of them.
    """

    def __init__(self, shards: Sequence[torch.Tensor], layout: Layout, lane: GatherLane) -> None:
        """Takes the shards; see ``foreach_all_gather``.

        Raises:
            ValueError: if they do not fit the layout or the device.
        """
        rank = checks.check_world(layout, lane.process_group, lane.name)
        checks.check_shards(shards, layout, lane.device, rank, lane.name)
        self.layout = layout
        self.tensors = tuple(shards)
        self._places = [place for place, shard in enumerate(shards) if shard.numel()]
        self._sources = [shards[place] for place in self._places]
        self._numel = sum(shard.numel() for shard in self._sources)
        self._row = self._as_row()

    def _as_row(self) -> list[torch.Tensor] | None:
        """All, flat, where they fill the beginning of the slice one after the other; else None.

        Only on a CPU, where there is no kernel for many copies.
        """
        end, row = 0, []
        dtype = self.layout.buffers[0].dtype
        for place, shard in zip(self._places, self._sources, strict=True):
            same = shard.dtype is dtype and shard.device.type == "cpu" and shard.is_contiguous()
            if not same or self.layout.slots[place].offset != end:
                return None
            row.append(shard.view(-1))
            end += shard.nbytes
        return row if len(self.layout.buffers) == 1 else None

    def pack(self, buffers: Buffers) -> None:
        """Copies them, cast, into this rank's slices, on the current stream."""
        if self._row:
            compat.end_to_end(self._row, buffers.slices[0].narrow(0, 0, self._numel))
            return
        if not self._sources:  # then there may be no slice of this rank
            return
        targets = buffers.shards
        if len(self._places) < len(targets):  # empty ones would keep foreach off its fast path
            targets = [targets[place] for place in self._places]
        compat.foreach_copy(targets, self._sources)


class FullTensors:
    """Tensors that gathers of one layout fill, again and again.

    Their views are made once; the memory behind them may come and go meanwhile.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], layout: Layout, lane: GatherLane) -> None:
        """Takes the tensors, which have their memory now; see ``foreach_all_gather_copy_out``.

        Raises:
            ValueError: if they do not fit the layout.
        """
        checks.check_outputs(outputs, layout, lane.device, lane.name)
        self.layout = layout
        self.nbytes = sum(output.nbytes for output in outputs)
        self.pieces = [
            view
            for output, spec, slot in zip(outputs, layout.specs, layout.slots, strict=True)
            for view in views.full_views(output, spec, slot)
        ]


@ranged("all_gather")
def foreach_all_gather(
    shards: Sequence[torch.Tensor] | OwnShards,
    layout: Layout,
    lane: GatherLane,
    *,
    async_op: bool = False,
) -> AllGatherInFlight:
    """A gather in flight, of every rank's shards, packed by ``layout``.

    The shards are copied (and cast) straight into this rank's slice of the gather's output, on the
    copy-in stream; the collective runs on the gather stream, or asynchronously where there are no
    streams. The streams do not see what the current stream wrote to the shards since
    ``lane.streams.synchronize_with_current()``.

    Args:
        shards: this rank's shard of each tensor, ``layout.specs[i].shard_shape(rank)``, any dtype.
            Or ``OwnShards`` of this layout and such a lane.
        layout: where things lie; its world size is the process group's.
        lane: collective, ranks, streams.
        async_op: ask the collective for a work handle on accelerators too.

    Raises:
        ValueError: if shards do not fit the layout or the device, or the layout does not fit the
            process group.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same collective.
    """
    own = shards if isinstance(shards, OwnShards) else OwnShards(shards, layout, lane)
    if own.layout is not layout and own.layout != layout:
        raise ValueError(
            f"{lane.name or 'a gather'}: the shards were checked for another layout than that of "
            "the gather; make OwnShards with the gather's"
        )
    rank = lane.process_group.rank()
    check_layout(EventKind.ALL_GATHER, lane.name, layout, lane.process_group)
    narrow = None
    if not layout.marks:  # which a gather of all slices would bring
        narrow = narrow_transport_of(
            layout, lane.comm, lane.process_group, lane.device, reduces=False
        )
    streams = lane.streams
    with streams.use(streams.copy_in):
        streams.collect(streams.copy_in)
        if narrow is None:
            buffers = lane.source.take(lane.comm, layout, rank, lane.device)
        else:
            few = few_ranks(layout)
            buffers = lane.source.take(lane.comm, layout, rank, lane.device, few)
        own.pack(buffers)
        packed = streams.record(streams.copy_in)
    if is_observed():
        nbytes = sum(spec.slice_nbytes for spec in layout.buffers)
        emit(EventKind.COPY_IN, lane.name, rank=rank, nbytes=nbytes, stream="copy_in")
    with streams.use(streams.gather):
        streams.gather.wait_event(packed)
        if narrow is not None:
            works = _all_gather_narrow(buffers, narrow, lane, async_op)
        else:
            works = tuple(
                work
                for buffer, part in zip(buffers.tensors, buffers.slices, strict=True)
                if (work := _all_gather(buffer, part, lane, rank, async_op)) is not None
            )
        event = streams.record(streams.gather)
    return AllGatherInFlight(layout, lane, buffers, works, event, own.tensors)


def _all_gather(
    output: torch.Tensor, own: torch.Tensor, lane: GatherLane, rank: int, async_op: bool
) -> dist.Work | None:
    if output.numel() == 0:
        return None  # the same on all ranks, so nobody waits for it
    emit(EventKind.ALL_GATHER, lane.name, rank=rank, nbytes=output.nbytes, stream="gather")
    with lane.streams.launching():
        try:
            work = lane.comm(
                output_tensor=output,
                input_tensor=own,
                group=lane.process_group,
                async_op=async_op or lane.streams.asynchronous_work,
            )
        except PeerLostError as error:
            error.say_where("gather", lane.name)
            raise
    if work is not None and not hasattr(work, "wait"):
        raise no_work(lane.comm, work)
    return work


def _all_gather_narrow(
    buffers: Buffers, transport: NarrowTransport, lane: GatherLane, async_op: bool
) -> tuple[dist.Work, ...]:
    """See [Note: narrow collectives]."""
    (output,) = buffers.tensors
    nbytes, slices = output.nbytes, buffers.all_slices
    emit(EventKind.ALL_GATHER, lane.name, rank=buffers.rank, nbytes=nbytes, stream="gather")
    with lane.streams.launching():
        asynchronous = async_op or lane.streams.asynchronous_work
        return transport.all_gather_narrow(slices, lane.process_group, asynchronous)


@ranged("all_gather_copy_out")
def foreach_all_gather_copy_out(
    in_flight: AllGatherInFlight, outputs: Sequence[torch.Tensor] | FullTensors
) -> None:
    """Full tensors, unpacked on the current stream from a gather in flight, which is used up.

    Args:
        in_flight: what ``foreach_all_gather`` gave.
        outputs: contiguous tensors of exactly the full size: ``layout.specs[i].shape``, or flat
            with as many elements. A dtype other than the spec's is cast to. They are written in
            place, so autograd's version counters advance. Or ``FullTensors`` of this layout.

    Raises:
        ValueError: if outputs do not fit the layout; the gather can still be claimed.
        RuntimeError: if the gather was claimed before.
    """
    layout, lane = in_flight.layout, in_flight.lane
    full = outputs if isinstance(outputs, FullTensors) else FullTensors(outputs, layout, lane)
    if full.layout is not layout and full.layout != layout:
        raise ValueError(
            f"{lane.name or 'a gather'}: the full tensors were made for another layout than that "
            "of the gather; make FullTensors with in_flight.layout"
        )
    buffers = in_flight.take()
    in_flight.wait()
    compat.foreach_copy(full.pieces, buffers.all_pieces)
    _give_back(buffers, lane)
    if is_observed():
        rank = lane.process_group.rank()
        emit(EventKind.COPY_OUT, lane.name, rank=rank, nbytes=full.nbytes, stream="current")


def foreach_all_gather_discard(in_flight: AllGatherInFlight) -> None:
    """Nothing: waits for a gather that nobody claimed, and lets its buffers go.

    Raises:
        RuntimeError: if the gather was claimed before.
    """
    in_flight.discard()


def _give_back(buffers: Buffers, lane: GatherLane) -> None:
    """Ends the use of ``buffers`` here, on the current stream."""
    if not lane.source.give_back(buffers):
        streams = lane.streams
        streams.outlive_workers(buffers.lent)
        tensors = buffers.drop_views()
        streams.outlive_workers(tensors)
        streams.retire(tensors, streams.copy_in, streams.record())
