"""Gathering a list of shards in one launch.

Owns: the order of pack, all-gather and unpack, their streams, and the lifetime of the buffers. The
state of one running gather is in one object, ``AllGatherInFlight``. Refuses: knowing what the
tensors are, where full tensors are kept, and when to gather: the caller does. Wrong arguments raise
before any collective is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.collectives.lost_ranks import raise_located, wait_for
from fullshard.comm.layouts import checks, views
from fullshard.comm.layouts.layout import Layout, PacksItself, TensorSpec
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.observer import CHECKS, LISTENERS, EventKind, emit
from fullshard.comm.runtime.ranges import NOTHING, is_profiled, named_range
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.comm.transports.collective import EPOCH, Route
from fullshard.comm.transports.config import GatherConfig

__all__ = [
    "AllGatherInFlight",
    "FullTensors",
    "OwnShards",
    "foreach_all_gather",
    "foreach_all_gather_copy_out",
]


@dataclass(eq=False)
class AllGatherInFlight:
    """A gather that was issued: its buffer, and what to wait for.

    Claim it once, by ``foreach_all_gather_copy_out`` or by ``discard()``.

    Attributes:
        layout: where things lie.
        config: what it was issued with.
        buffer: what is gathered; None once claimed.
        work: the handle of an asynchronous collective, or None.
        event: the end of the gather on its stream.
        sources: what the packing reads; kept until it has.
    """

    layout: Layout
    config: GatherConfig
    buffer: Buffer | None
    work: dist.Work | None
    event: StreamEvent
    sources: tuple[torch.Tensor, ...]

    def wait(self) -> None:
        """Make what was gathered usable on the current stream. May be called again.

        Without streams it blocks until the bytes are there.
        """
        streams = self.config.streams
        if self.work is not None:
            # A work's wait() may decode, in memory that belongs to the gather stream.
            with streams.use(streams.gather):
                wait_for(self.config, self.work)
            self.event = streams.record(streams.gather)
            self.work = None
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
        """Wait for a gather that has not been claimed, and release its buffer.

        Raises:
            RuntimeError: if the gather was claimed before.
        """
        buffer = self.take()
        self.wait()
        streams = self.config.streams
        self.config.source.release(buffer, streams, streams.copy_in)


class OwnShards:
    """This rank's shards, which gathers of one layout send again and again: checked once.

    Attributes:
        layout: the positions of the shards.
        tensors: all of them.
    """

    def __init__(
        self, shards: Sequence[torch.Tensor], layout: Layout, config: GatherConfig
    ) -> None:
        """Take the shards; see ``foreach_all_gather``.

        Raises:
            ValueError: if they do not fit the layout or the device.
        """
        self._rank = checks.check_world(layout, config.process_group, config.name)
        checks.check_shards(shards, layout, config.device, self._rank, config.name)
        self.layout = layout
        self.tensors = tuple(shards)
        shards = [shard.detach() for shard in shards]  # no step turns gradients off for them
        held = [place for place, shard in enumerate(shards) if shard.numel()]
        own = _own_forms(layout.specs)
        self._own_forms = [(place, own[place], shards[place]) for place in held if place in own]
        self._places = [place for place in held if place not in own]
        self._sources = [shards[place] for place in self._places]
        self._route: Route | None = None  # of gathers by ``_routed``
        self._routed: GatherConfig | None = None
        self._flat = _end_to_end(shards, layout)
        self._sizes = [shard.numel() for shard in self._flat]
        self._numel = sum(self._sizes)
        self._casts = any(shard.dtype is not layout.buffer.dtype for shard in self._flat)

    def pack(self, buffer: Buffer) -> None:
        """Copy the shards, as they travel, into this rank's slice on the current stream."""
        for place, spec, shard in self._own_forms:
            spec.pack(shard, buffer.shards[place], self._rank)
        if not self._sources:
            return
        if self._flat:
            target = buffer.slice
            if target.shape[0] > self._numel:  # what follows is padding
                target = target.narrow(0, 0, self._numel)
            if self._casts:
                compat.foreach_copy(target.split(self._sizes), self._flat)
            else:
                torch.cat(self._flat, out=target)
            return
        targets = buffer.shards
        if len(self._places) < len(targets):  # empty ones would keep foreach off its fast path
            targets = [targets[place] for place in self._places]
        compat.foreach_copy(targets, self._sources)

    def gather(self, config: GatherConfig, *, async_op: bool = False) -> AllGatherInFlight:
        """Pack the shards, launch the all-gather and return it; see ``foreach_all_gather``."""
        layout, group, streams = self.layout, config.process_group, config.streams
        with named_range("all_gather", config.name) if is_profiled() else NOTHING:
            if CHECKS:
                checks.check_launch(EventKind.ALL_GATHER, config.name, layout, group)
            route = self._route
            if route is None or self._routed is not config or route.epoch != EPOCH[0]:
                route = config.collective.gather_route(group, config.device)
                self._route, self._routed = route, config
            work = None
            with streams.use(streams.copy_in):
                buffer = config.source.take(config.collective, layout, self._rank, config.device)
                self.pack(buffer)
                packed = streams.record(streams.copy_in)
            output = buffer.tensor
            if LISTENERS:
                config.emit_launch(buffer.slice.nbytes, output.nbytes)
            with streams.use(streams.gather):
                streams.gather.wait_event(packed)
                try:
                    if output.numel():  # equal on all ranks: none waits for an empty collective
                        asynchronous = async_op or streams.asynchronous_work
                        work = route.launch(output, buffer.slice, group, asynchronous)
                except RuntimeError as error:
                    raise_located(error, config.what, config.name, group)
                event = streams.record(streams.gather)
            return AllGatherInFlight(layout, config, buffer, work, event, self.tensors)


def _own_forms(specs: Sequence[TensorSpec]) -> dict[int, PacksItself]:
    """Return the specs that pack themselves, by their places."""
    return {place: spec for place, spec in enumerate(specs) if isinstance(spec, PacksItself)}


def _end_to_end(shards: Sequence[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
    """The shards with elements, flat, if a slice has them in the buffer's dtype without a gap."""
    end, dtype = 0, layout.buffer.dtype
    for shard, spec, extent in zip(shards, layout.specs, layout.extents, strict=True):
        if shard.numel():
            plain = spec.dtype is dtype and spec is spec.arrives_as
            if not plain or not shard.is_contiguous() or extent.offset != end:
                return []
            end += shard.numel() * dtype.itemsize
    return [shard.view(-1) for shard in shards if shard.numel()]


def _rows_of(
    pieces: Sequence[torch.Tensor], layout: Layout
) -> tuple[list[int], list[torch.Tensor]] | None:
    """Return what fills all tensors from the slices of a buffer by one kernel, if that is possible.

    It is if all tensors are contiguous, of one dtype, and divided evenly.

    Returns:
        The elements of each tensor in a slice, then those of the padding, if any; and the memory of
        each, ``[ranks, n]``, then memory for the padding.
    """
    dtype = layout.buffer.dtype
    alike = all(spec.dtype is dtype and spec is spec.arrives_as for spec in layout.specs)
    alike &= all(each.dtype is dtype and each.is_contiguous() for each in pieces)
    if not (alike and pieces and views.divides_evenly(layout)):
        return None
    ranks = layout.world_size
    targets = [piece.view(ranks, -1) for piece in pieces]
    sizes = [target.shape[1] for target in targets]
    padding = layout.buffer.slice_numel - sum(sizes)
    if padding:
        with torch.inference_mode(False):  # training fills it too
            targets.append(targets[0].new_empty(ranks, padding))
        sizes.append(padding)
    return sizes, targets


class FullTensors:
    """Tensors that gathers of one layout fill, again and again.

    Their views are made once; the memory of the tensors may be freed and allocated between gathers.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], layout: Layout, config: GatherConfig
    ) -> None:
        """Take the tensors, which have their memory now; see ``foreach_all_gather_copy_out``.

        Raises:
            ValueError: if they do not fit the layout.
        """
        checks.check_outputs(outputs, layout, config.device, config.name)
        self._layout = layout
        self._nbytes = sum(output.nbytes for output in outputs)
        own = _own_forms(layout.specs).items()
        self._own_forms = [(place, spec, outputs[place].detach()) for place, spec in own]
        all_of = zip(outputs, layout.specs, layout.extents, strict=True)
        self._pieces = [
            view
            for output, spec, extent in all_of
            if spec is spec.arrives_as
            for view in views.full_views(output.detach(), spec, extent.pieces)
        ]
        self._rows: tuple[list[int], list[torch.Tensor]] | None = _rows_of(self._pieces, layout)

    def fill(self, in_flight: AllGatherInFlight) -> None:
        """Wait for a gather, copy its buffer to the tensors, and release the buffer."""
        config, layout = in_flight.config, in_flight.layout
        assert self._layout is layout or self._layout == layout, "they were made for another"
        with named_range("all_gather_copy_out", config.name) if is_profiled() else NOTHING:
            buffer = in_flight.take()
            in_flight.wait()
            if self._rows and buffer.stacked is not None:
                sizes, targets = self._rows
                compat.split_rows(buffer.stacked, sizes, 1, out=targets)
            else:
                arrived = self._unpacked(buffer) if self._own_forms else buffer.all_pieces
                compat.foreach_copy(self._pieces, arrived)
            config.source.release(buffer, config.streams, config.streams.copy_in)
        if LISTENERS:
            rank = config.process_group.rank()
            emit(EventKind.COPY_OUT, config.name, rank=rank, nbytes=self._nbytes, stream="current")

    def _unpacked(self, buffer: Buffer) -> list[torch.Tensor]:
        """Fill the tensors that travelled in a form of their own; return the pieces of others."""
        pieces = list(buffer.pieces)
        for place, spec, output in self._own_forms:
            spec.unpack(pieces[place], output, self._layout.world_size)
            pieces[place] = []
        return [view for piece in pieces for view in piece]


def foreach_all_gather(
    shards: Sequence[torch.Tensor],
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
        shards: this rank's shard of each tensor, ``layout.specs[i].shard_shape(rank)``. Another
            dtype than the spec's is cast, unless the cast could lose more than precision. Use
            ``OwnShards``, which checks them once, for shards that are sent repeatedly.
        layout: where things lie; its world size is the process group's.
        config: collective, ranks, streams.
        async_op: ask the collective for a work handle on accelerators too.

    Raises:
        ValueError: if shards do not fit the layout or the device, or the layout does not fit the
            process group.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same collective.
    """
    return OwnShards(shards, layout, config).gather(config, async_op=async_op)


def foreach_all_gather_copy_out(
    in_flight: AllGatherInFlight, outputs: Sequence[torch.Tensor]
) -> None:
    """Full tensors, unpacked on the current stream from a gather in flight, which is used up.

    Args:
        in_flight: what ``foreach_all_gather`` gave.
        outputs: contiguous tensors of exactly the full size: ``layout.specs[i].shape``, or flat
            with as many elements. A dtype other than the spec's is cast to, unless the cast
            could lose more than precision. The outputs are written in place, so autograd's version
            counters advance. Use ``FullTensors`` for outputs that are filled repeatedly.

    Raises:
        ValueError: if outputs do not fit the layout; the gather can still be claimed.
        RuntimeError: if the gather was claimed before.
    """
    FullTensors(outputs, in_flight.layout, in_flight.config).fill(in_flight)
