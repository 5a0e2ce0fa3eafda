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

from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.collectives.composed import choose_gather
from fullshard.comm.debug.debug import DEBUGGED, check_layout
from fullshard.comm.layouts import checks, views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.compat import HiddenContext, in_backward
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.runtime.observer import LISTENERS, EventKind, emit
from fullshard.comm.runtime.ranges import NOTHING, is_profiled, named_range
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.same_host.shared_signals import PeerLostError
from fullshard.comm.transports.collective import no_work
from fullshard.comm.transports.config import GatherConfig
from fullshard.comm.transports.first_ranks import for_first_ranks

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
    """A gather that was issued: its buffer, and what to wait for.

    Claim it once, by copy-out or by discard.

    Attributes:
        layout: where things lie.
        config: what it was issued with.
        buffer: what is gathered; None once claimed.
        work: the handle of an asynchronous collective, or None.
        event: the end of the gather on its stream; None without streams.
        sources: what the packing reads; kept until it has.
    """

    layout: Layout
    config: GatherConfig
    buffer: Buffer | None
    work: dist.Work | None
    event: StreamEvent | None
    sources: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Make what was gathered usable on the current stream. May be called again.

        Without streams it blocks until the bytes are there.
        """
        streams = self.config.streams
        if self.work is not None:
            # A work's wait() may decode, in memory that belongs to the gather stream.
            with NOTHING if streams.asynchronous_work else streams.use(streams.gather):
                try:
                    self.work.wait()
                except PeerLostError as error:
                    error.say_where("gather", self.config.name)
                    raise
            if self.event is not None:
                self.event = streams.record(streams.gather)
            self.work = None
        if self.event is not None:
            streams.current().wait_event(self.event)
        self.sources = ()

    def take(self) -> Buffer:
        """The buffer, which from now on is the caller's to give back.

        Raises:
            RuntimeError: if the gather was claimed before.
        """
        if self.buffer is None:
            raise RuntimeError(
                f"the gather of {self.config.name or 'these tensors'} was already copied out or "
                "discarded; issue a new one with foreach_all_gather."
            )
        buffer, self.buffer = self.buffer, None
        return buffer

    def discard(self) -> None:
        """Wait for a gather that nobody claimed, and let its buffer go.

        Raises:
            RuntimeError: if the gather was claimed before.
        """
        buffer = self.take()
        self.wait()
        if not self.config.source.give_back(buffer):
            _let_go(buffer, self.config)


class OwnShards:
    """This rank's shards, which gathers of one layout send again and again: checked once.

    Attributes:
        layout: where they will lie.
        tensors: all of them.
        few: the layout of the few ranks that hold all; None: those are not few.
    """

    def __init__(
        self, shards: Sequence[torch.Tensor], layout: Layout, config: GatherConfig
    ) -> None:
        """Takes the shards; see ``foreach_all_gather``.

        Raises:
            ValueError: if they do not fit the layout or the device.
        """
        rank = checks.check_world(layout, config.process_group, config.name)
        checks.check_shards(shards, layout, config.device, rank, config.name)
        self.layout = layout
        self.tensors = tuple(shards)
        shards = [shard.detach() for shard in shards]  # no step turns gradients off for them
        self._places = [place for place, shard in enumerate(shards) if shard.numel()]
        self._sources = [shards[place] for place in self._places]
        self._numel = sum(shard.numel() for shard in self._sources)
        self._row = self._as_row(config)
        self.few = None if layout.mask_numel else for_first_ranks(layout)

    def _as_row(self, config: GatherConfig) -> list[torch.Tensor] | None:
        """All, flat, where they fill the beginning of the slice one after the other; else None.

        Only on a device without a kernel for many copies.
        """
        if traits_of(config.device).list_kernels:
            return None
        end, row = 0, []
        dtype = self.layout.buffer.dtype
        for place, shard in zip(self._places, self._sources, strict=True):
            same = shard.dtype is dtype and shard.is_contiguous()
            if not same or self.layout.extents[place].offset != end:
                return None
            row.append(shard.view(-1))
            end += shard.nbytes
        return row

    def pack(self, buffer: Buffer) -> None:
        """Copies them, cast, into this rank's slice, on the current stream."""
        if self._row:
            compat.end_to_end(self._row, buffer.slice.narrow(0, 0, self._numel))
            return
        if not self._sources:  # then there may be no slice of this rank
            return
        targets = buffer.shards
        if len(self._places) < len(targets):  # empty ones would keep foreach off its fast path
            targets = [targets[place] for place in self._places]
        compat.foreach_copy(targets, self._sources)


class FullTensors:
    """Tensors that gathers of one layout fill, again and again.

    Their views are made once; the memory behind them may come and go meanwhile.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], layout: Layout, config: GatherConfig
    ) -> None:
        """Takes the tensors, which have their memory now; see ``foreach_all_gather_copy_out``.

        Raises:
            ValueError: if they do not fit the layout.
        """
        checks.check_outputs(outputs, layout, config.device, config.name)
        self.layout = layout
        self.nbytes = sum(output.nbytes for output in outputs)
        self.pieces = [
            view
            for output, spec, extent in zip(outputs, layout.specs, layout.extents, strict=True)
            for view in views.full_views(output.detach(), spec, extent.pieces)
        ]


def foreach_all_gather(
    shards: Sequence[torch.Tensor] | OwnShards,
    layout: Layout,
    config: GatherConfig,
    *,
    async_op: bool = False,
) -> AllGatherInFlight:
    """A gather in flight, of every rank's shards, packed by ``layout``.

    The shards are copied (and cast) straight into this rank's slice of the gather's output, on the
    copy-in stream; the collective runs on the gather stream, or asynchronously where there are no
    streams. The streams do not see what the current stream wrote to the shards since
    ``config.streams.synchronize_with_current()``.

    Args:
        shards: this rank's shard of each tensor, ``layout.specs[i].shard_shape(rank)``, any dtype.
            Or ``OwnShards`` of this layout and such a config.
        layout: where things lie; its world size is the process group's.
        config: collective, ranks, streams.
        async_op: ask the collective for a work handle on accelerators too.

    Raises:
        ValueError: if shards do not fit the layout or the device, or the layout does not fit the
            process group.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same collective.
    """
    own = shards if isinstance(shards, OwnShards) else OwnShards(shards, layout, config)
    if own.layout is not layout and own.layout != layout:
        raise ValueError(
            f"{config.name or 'a gather'}: the shards were checked for another layout than that of "
            "the gather; make OwnShards with the gather's"
        )
    with named_range("all_gather", config.name) if is_profiled() else NOTHING:
        if DEBUGGED:
            check_layout(EventKind.ALL_GATHER, config.name, layout, config.process_group)
        if config.chosen.launch is None:
            choose_gather(config)
        if not config.streams.asynchronous_work:
            return _gather_on_streams(own, config, async_op)
        rank, packed = config.process_group.rank(), layout
        if own.few is not None and config.chosen.to_first is not None:
            packed = own.few
            rank = min(rank, packed.world_size - 1)  # of the others nothing is packed
        buffer = config.source.take(config.comm, packed, rank, config.device)
        own.pack(buffer)
        work = _launch(buffer, config, True)
        return AllGatherInFlight(layout, config, buffer, work, None, own.tensors)


def _gather_on_streams(own: OwnShards, config: GatherConfig, async_op: bool) -> AllGatherInFlight:
    """The gather in flight, on a device whose streams wait for each other."""
    streams, rank = config.streams, config.process_group.rank()
    with streams.use(streams.copy_in):
        streams.collect(streams.copy_in)
        buffer = config.source.take(config.comm, own.layout, rank, config.device)
        own.pack(buffer)
        packed = streams.record(streams.copy_in)
    with streams.use(streams.gather):
        streams.gather.wait_event(packed)
        work = _launch(buffer, config, async_op)
        event = streams.record(streams.gather)
    return AllGatherInFlight(own.layout, config, buffer, work, event, own.tensors)


def _launch(buffer: Buffer, config: GatherConfig, async_op: bool) -> dist.Work | None:
    """The collective of a packed buffer, and its handle unless it is over."""
    chosen, group, output = config.chosen, config.process_group, buffer.tensor
    assert chosen.launch is not None, "it was chosen"
    if LISTENERS:
        rank, nbytes = group.rank(), buffer.slice.nbytes
        emit(EventKind.COPY_IN, config.name, rank=rank, nbytes=nbytes, stream="copy_in")
    if output.numel() == 0:
        return None  # the same on all ranks, so nobody waits for it
    if LISTENERS:
        nbytes = output.nbytes
        emit(EventKind.ALL_GATHER, config.name, rank=rank, nbytes=nbytes, stream="gather")
    with HiddenContext() if config.streams.asynchronous_work and in_backward() else NOTHING:
        if chosen.to_first is not None and buffer.layout.world_size < group.size():
            return SeveralWorks(chosen.to_first(buffer.all_slices, group))
        try:
            work = chosen.launch(output, buffer.slice, group, async_op)
        except PeerLostError as error:
            error.say_where("gather", config.name)
            raise
    if work is not None and not hasattr(work, "wait"):
        raise no_work(config.comm, work)
    return work


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
    layout, config = in_flight.layout, in_flight.config
    full = outputs if isinstance(outputs, FullTensors) else FullTensors(outputs, layout, config)
    if full.layout is not layout and full.layout != layout:
        raise ValueError(
            f"{config.name or 'a gather'}: the full tensors were made for another layout than that "
            "of the gather; make FullTensors with in_flight.layout"
        )
    with named_range("all_gather_copy_out", config.name) if is_profiled() else NOTHING:
        buffer = in_flight.take()
        in_flight.wait()
        compat.foreach_copy(full.pieces, buffer.all_pieces)
        if not config.source.give_back(buffer):
            _let_go(buffer, config)
    if LISTENERS:
        rank = config.process_group.rank()
        emit(EventKind.COPY_OUT, config.name, rank=rank, nbytes=full.nbytes, stream="current")


def foreach_all_gather_discard(in_flight: AllGatherInFlight) -> None:
    """Nothing: waits for a gather that nobody claimed, and lets its buffers go.

    Raises:
        RuntimeError: if the gather was claimed before.
    """
    in_flight.discard()


def _let_go(buffer: Buffer, config: GatherConfig) -> None:
    """Ends the use of ``buffer``, which nobody keeps, on the current stream."""
    streams = config.streams
    streams.outlive_workers(buffer.lent)
    tensor = buffer.release()
    streams.outlive_workers([tensor])
    streams.retire([tensor], streams.copy_in, streams.record())
