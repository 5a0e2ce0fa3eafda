"""Gathering a list of shards in one launch.

Owns: the order of pack, all-gather and unpack, on which stream each runs, and what stays alive
meanwhile. What exists only while a gather runs is in one object, ``AllGatherInFlight``. Refuses:
knowing what the tensors are, where full tensors are kept, and when to gather: the caller does. What
can be wrong with the arguments is raised before any collective is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import Buffers
from fullshard.comm.collectives.composed import DefaultAllGather
from fullshard.comm.debug.debug import DEBUGGED, check_layout
from fullshard.comm.layouts import checks, views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.compat import HiddenContext, in_backward
from fullshard.comm.runtime.observer import LISTENERS, EventKind, emit
from fullshard.comm.runtime.ranges import NOTHING, is_profiled, named_range
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.comm.same_host.shared_signals import PeerLostError
from fullshard.comm.transports.collective import AllGather, no_work
from fullshard.comm.transports.config import GatherConfig
from fullshard.comm.transports.narrow import gathers_narrow, narrowed

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
        config: what it was issued with.
        buffers: the gathered buffers; None once claimed.
        works: handles of collectives that were issued asynchronously.
        event: the end of the gather on its stream; None without streams.
        sources: what the packing reads; kept until it has.
    """

    layout: Layout
    config: GatherConfig
    buffers: Buffers | None
    works: tuple[dist.Work, ...]
    event: StreamEvent | None
    sources: tuple[torch.Tensor, ...]

    @property
    def work(self) -> dist.Work | None:
        """The handle of the last asynchronous collective, or None."""
        return self.works[-1] if self.works else None

    def wait(self) -> None:
        """Make the gathered buffers usable on the current stream. May be called again.

        Without streams it blocks until the bytes are there.
        """
        streams = self.config.streams
        if self.works:
            # A work's wait() may decode, in memory that belongs to the gather stream.
            with NOTHING if streams.asynchronous_work else streams.use(streams.gather):
                try:
                    for work in self.works:
                        work.wait()
                except PeerLostError as error:
                    error.say_where("gather", self.config.name)
                    raise
            if self.event is not None:
                self.event = streams.record(streams.gather)
            self.works = ()
        if self.event is not None:
            streams.current().wait_event(self.event)
        self.sources = ()

    def take(self) -> Buffers:
        """The buffers, which from now on are the caller's to give back.

        Raises:
            RuntimeError: if the gather was claimed before.
        """
        if self.buffers is None:
            raise RuntimeError(
                f"the gather of {self.config.name or 'these tensors'} was already copied out or "
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
        if not self.config.source.give_back(buffers):
            _let_go(buffers, self.config)


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
        self._row = self._as_row()
        self.few = None if layout.marks else narrowed(layout)

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
            for output, spec, slot in zip(outputs, layout.specs, layout.slots, strict=True)
            for view in views.full_views(output.detach(), spec, slot)
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
        if not config.streams.asynchronous_work:
            return _gather_on_streams(own, config, async_op)
        rank = config.process_group.rank()
        few = own.few
        if few is not None and not config.chosen.launch:
            _choose(config)
        if few is not None and config.chosen.narrow:
            return _gather_narrow(own, few, config)
        buffers = config.source.take(config.comm, layout, rank, config.device)
        own.pack(buffers)
        works = _launch(buffers, config, True)
        return AllGatherInFlight(layout, config, buffers, works, None, own.tensors)


def _gather_on_streams(own: OwnShards, config: GatherConfig, async_op: bool) -> AllGatherInFlight:
    """The gather in flight, on a device whose streams wait for each other."""
    streams, rank = config.streams, config.process_group.rank()
    with streams.use(streams.copy_in):
        streams.collect(streams.copy_in)
        buffers = config.source.take(config.comm, own.layout, rank, config.device)
        own.pack(buffers)
        packed = streams.record(streams.copy_in)
    with streams.use(streams.gather):
        streams.gather.wait_event(packed)
        works = _launch(buffers, config, async_op)
        event = streams.record(streams.gather)
    return AllGatherInFlight(own.layout, config, buffers, works, event, own.tensors)


def _gather_narrow(own: OwnShards, few: Layout, config: GatherConfig) -> AllGatherInFlight:
    """The gather in flight, by broadcasts of the few; see [Note: narrow collectives]."""
    rank = config.process_group.rank()
    buffers = config.source.take(config.comm, few, min(rank, few.world_size - 1), config.device)
    own.pack(buffers)  # the others have nothing to pack
    if LISTENERS:
        nbytes = few.buffers[0].slice_nbytes
        emit(EventKind.COPY_IN, config.name, rank=rank, nbytes=nbytes, stream="copy_in")
        nbytes *= few.world_size
        emit(EventKind.ALL_GATHER, config.name, rank=rank, nbytes=nbytes, stream="gather")
    with HiddenContext() if in_backward() else NOTHING:
        works = compat.broadcast_list(buffers.all_slices, config.process_group)
    return AllGatherInFlight(own.layout, config, buffers, works, None, own.tensors)


def _launch(buffers: Buffers, config: GatherConfig, async_op: bool) -> tuple[dist.Work, ...]:
    """The collectives of packed buffers, and the handles of those that are not over."""
    launch, group = config.chosen.launch or _choose(config), config.process_group
    if LISTENERS:
        nbytes = sum(part.nbytes for part in buffers.slices)
        emit(EventKind.COPY_IN, config.name, rank=buffers.rank, nbytes=nbytes, stream="copy_in")
    works = []
    for output, own in zip(buffers.tensors, buffers.slices, strict=True):
        if output.numel() == 0:
            continue  # the same on all ranks, so nobody waits for it
        if LISTENERS:
            nbytes, rank = output.nbytes, buffers.rank
            emit(EventKind.ALL_GATHER, config.name, rank=rank, nbytes=nbytes, stream="gather")
        with HiddenContext() if config.streams.asynchronous_work and in_backward() else NOTHING:
            try:
                work = launch(output, own, group, async_op)
            except PeerLostError as error:
                error.say_where("gather", config.name)
                raise
        if work is not None:
            if not hasattr(work, "wait"):
                raise no_work(config.comm, work)
            works.append(work)
    return tuple(works)


def _choose(config: GatherConfig) -> Callable[..., dist.Work | None]:
    """Who is called from now on; see ``Chosen``."""
    comm = config.comm
    transport = None
    if isinstance(comm, DefaultAllGather):
        transport = comm.serving(config.process_group, config.device)
        if transport is not None:
            config.chosen.narrow = comm.reusable and gathers_narrow(transport, config.device)
    config.chosen.launch = _by_name(comm) if transport is None else transport.all_gather
    return config.chosen.launch


def _by_name(comm: AllGather) -> Callable[..., dist.Work | None]:
    """Calls a collective by the names of its arguments, as it was checked for."""

    def launch(
        output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        return comm(output_tensor=output, input_tensor=own, group=group, async_op=async_op)

    return launch


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
        buffers = in_flight.take()
        in_flight.wait()
        compat.foreach_copy(full.pieces, buffers.all_pieces)
        if not config.source.give_back(buffers):
            _let_go(buffers, config)
    if LISTENERS:
        rank = config.process_group.rank()
        emit(EventKind.COPY_OUT, config.name, rank=rank, nbytes=full.nbytes, stream="current")


def foreach_all_gather_discard(in_flight: AllGatherInFlight) -> None:
    """Nothing: waits for a gather that nobody claimed, and lets its buffers go.

    Raises:
        RuntimeError: if the gather was claimed before.
    """
    in_flight.discard()


def _let_go(buffers: Buffers, config: GatherConfig) -> None:
    """Ends the use of ``buffers``, which nobody keeps, on the current stream."""
    streams = config.streams
    streams.outlive_workers(buffers.lent)
    tensors = buffers.drop_views()
    streams.outlive_workers(tensors)
    streams.retire(tensors, streams.copy_in, streams.record())
