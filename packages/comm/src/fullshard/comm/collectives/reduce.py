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
from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.buffers.packing import pack_gradients, scale_tensors
from fullshard.comm.collectives.composed import choose_reduction
from fullshard.comm.debug.debug import DEBUGGED, check_layout
from fullshard.comm.layouts import checks, views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.runtime.compat import HiddenContext, in_backward
from fullshard.comm.runtime.observer import LISTENERS, EventKind, emit
from fullshard.comm.runtime.ranges import NOTHING, is_profiled, without_grad_in_range
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.same_host.shared_signals import PeerLostError
from fullshard.comm.transports.collective import no_work
from fullshard.comm.transports.config import ReduceConfig
from fullshard.comm.transports.contribution import Contribution, PartsReducer
from fullshard.comm.transports.first_ranks import for_first_ranks

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
        mask: ``[layout.mask_numel]``, greater than 0 where any rank had a gradient; None if the
            layout has no used-parameter mask.
        output: the buffer.
    """

    shards: list[torch.Tensor]
    mask: torch.Tensor | None
    output: torch.Tensor

    @classmethod
    def of(cls, output: torch.Tensor, layout: Layout, rank: int) -> ReducedShards:
        """What lies in ``rank``'s slice of the result, ``[slice_numel]``."""
        return cls(
            shards=views.shard_views(output, layout, rank),
            mask=views.own_mask(output, layout) if layout.mask_numel else None,
            output=output,
        )


@dataclass(eq=False)
class ReduceInFlight:
    """A reduction that was issued. ``wait()`` gives its result.

    Attributes:
        layout: where things lie.
        config: what it was issued with.
        packed: the gradients that an asynchronous collective reads, kept until it is over; None
            after, or where streams keep them.
        given: this rank's slice of the result; None until a collective that asks for it when all
            parts are there has done so.
        lent: what else the collective was given. The same memory as ``output``, since a gradient
            may be a view of the result, and keeps it for longer than any worker thread does; and
            gradients that it reads where they lie. None of it once the collective is over.
        work: the handle of an asynchronous collective, or None.
        event: the end of the reduction on its stream; None without streams.
    """

    layout: Layout
    config: ReduceConfig
    packed: Buffer | None
    given: torch.Tensor | None
    lent: tuple[torch.Tensor, ...]
    work: dist.Work | None
    event: StreamEvent | None
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
        self.given = _output(self.layout, self.config)
        return views.alias_of(self.given)

    def advance(self) -> None:
        """Nothing: the collective was launched, and none follows."""

    def land(self) -> None:
        """As ``wait()``, which is all there is to do."""
        self.wait()

    def wait(self) -> ReducedShards:
        """The reduced shards, usable on the current stream; later calls give the same.

        Without streams it blocks until they are there.
        """
        if self._result is None:
            if self.work is not None:
                self._finish(self.work)
            rank = self.config.process_group.rank()
            self._result = ReducedShards.of(self.output, self.layout, rank)
        if self.event is not None:
            self.config.streams.current().wait_event(self.event)
        return self._result

    def _finish(self, work: dist.Work) -> None:
        """Waits for an asynchronous collective, scales its result and gives its inputs back."""
        try:
            work.wait()
        except PeerLostError as error:
            error.say_where("reduction", self.config.name)
            raise
        scale_tensors(self.output, self.layout, self.config.scaling.post)
        self.work = None
        tensors, self.lent = list(self.lent), ()
        packed, self.packed = self.packed, None
        if packed is not None and not self.config.source.give_back(packed):
            tensors.append(packed.release())
        self.config.streams.outlive_workers(tensors)


def foreach_reduce(
    gradients: Sequence[torch.Tensor | None],
    layout: Layout,
    config: ReduceConfig,
) -> ReduceInFlight:
    """A reduction in flight, after which each rank holds its shard of every reduced gradient.

    The input is packed on the current stream, so gradients may be freed when this returns; the
    collective and the scaling after it run on the reduce stream, or asynchronously where there are
    no streams. A collective that has a ``parts_reducer`` packs nothing, and reads gradients where
    they lie: nobody writes to them until the reduction is over. By default that is so between CPU
    ranks of one host.

    Args:
        gradients: the full gradient of each tensor, ``layout.specs[i].shape``, any dtype, or None
            for an extent of zeros.
        layout: where things lie: one buffer of one floating-point dtype, in which the reduction
            happens. With ``layout.mask_numel == len(gradients)``, element ``i`` of the mask tells
            whether any rank had gradient ``i``.
        config: collective, ranks, streams, scaling.

    Raises:
        ValueError: if gradients do not fit the layout or the device, or the layout does not fit the
            process group.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same collective.
    """
    loud = is_profiled() or torch.is_grad_enabled()  # a backward has gradients off, as a rule
    with without_grad_in_range("post_backward_reduce", config.name) if loud else NOTHING:
        rank = checks.check_world(layout, config.process_group, config.name)
        checks.check_gradients(gradients, layout, config.device, config.name)
        if DEBUGGED:
            check_layout(
                EventKind.REDUCE_SCATTER, config.name, layout, config.process_group, config.scaling
            )
        chosen = config.chosen
        if chosen.launch is None:
            choose_reduction(config)
        if chosen.parts is not None and layout.buffer.slice_numel:
            in_parts = _reduce_parts(gradients, layout, config, chosen.parts)
            if in_parts is not None:
                return in_parts
        few = None if chosen.to_first is None else for_first_ranks(layout)
        if few is not None:
            return _reduce_to_first(gradients, layout, few, config)
        if not config.streams.asynchronous_work:
            return _reduce_on_streams(gradients, layout, config)
        packed = config.source.take(config.comm, layout, rank, config.device)
        pack_gradients(packed, gradients, config.scaling)
        output = _output(layout, config)
        lent = views.alias_of(output)
        work = _launch(lent, packed, config)
        if work is not None:
            return ReduceInFlight(layout, config, packed, output, (lent,), work, None)
        scale_tensors(output, layout, config.scaling.post)
        config.source.give_back(packed)
        return ReduceInFlight(layout, config, None, output, (), None, None)


def _reduce_on_streams(
    gradients: Sequence[torch.Tensor | None], layout: Layout, config: ReduceConfig
) -> ReduceInFlight:
    """The reduction in flight, on a device whose streams wait for each other."""
    streams, rank = config.streams, config.process_group.rank()
    owner = streams.current()
    streams.collect(owner, keep=config.inputs_in_flight - 1)  # those travel while one is packed
    buffer = config.source.take(config.comm, layout, rank, config.device)
    pack_gradients(buffer, gradients, config.scaling)
    packed = streams.record(owner)
    with streams.use(streams.reduce):
        streams.reduce.wait_event(packed)
        output = _output(layout, config)
        work = _launch(views.alias_of(output), buffer, config)
        if work is not None:
            work.wait()  # makes the reduce stream wait, not the host
        scale_tensors(output, layout, config.scaling.post)
        event = streams.record(streams.reduce)
    if not config.source.give_back(buffer):
        streams.retire([buffer.tensor], owner, event)
    return ReduceInFlight(layout, config, None, output, (), None, event)


def _reduce_to_first(
    gradients: Sequence[torch.Tensor | None], layout: Layout, few: Layout, config: ReduceConfig
) -> ReduceInFlight:
    """The reduction in flight to the few that get a part; see ``first_ranks``."""
    group, launch = config.process_group, config.chosen.to_first
    assert launch is not None, "it was chosen"
    rank = group.rank()
    packed = config.source.take(config.comm, few, min(rank, few.world_size - 1), config.device)
    pack_gradients(packed, gradients, config.scaling)
    mask, output = packed.mask[0].clone(), _output(layout, config)  # every rank asks for the mask
    if LISTENERS:
        _tell(config, packed.tensor.nbytes)
    with HiddenContext() if in_backward() else NOTHING:
        works = launch(packed.all_slices, mask, group, config.scaling.op)

    def land() -> None:
        if rank < few.world_size:
            output.copy_(packed.all_slices[rank])
        else:
            views.own_mask(output, layout).copy_(mask)

    work, lent = SeveralWorks(works, land), (mask, *packed.all_slices)
    return ReduceInFlight(layout, config, packed, output, lent, work, None)


def _reduce_parts(
    gradients: Sequence[torch.Tensor | None],
    layout: Layout,
    config: ReduceConfig,
    reducer: PartsReducer,
) -> ReduceInFlight | None:
    """The reduction in flight of gradients as they lie; None, on all ranks, if there is no room."""
    rank = config.process_group.rank()
    given = Contribution(gradients, layout, rank, config.scaling)
    event = (
        None if config.streams.asynchronous_work else config.streams.record(config.streams.reduce)
    )
    flight = ReduceInFlight(layout, config, None, None, (), None, event)
    try:
        flight.work = reducer.reduce_parts(
            flight.allocate, given, config.process_group, config.scaling.op
        )
    except PeerLostError as error:
        error.say_where("reduction", config.name)
        raise
    if flight.work is None:
        return None
    if LISTENERS:
        _tell(config, layout.buffer.slice_nbytes * layout.world_size)
    return flight


def _tell(config: ReduceConfig, nbytes: int) -> None:
    """Tells observers of a reduction of ``nbytes``; of none its packing only."""
    rank = config.process_group.rank()
    emit(EventKind.COPY_IN, config.name, rank=rank, nbytes=nbytes, stream="current")
    if nbytes:
        emit(EventKind.REDUCE_SCATTER, config.name, rank=rank, nbytes=nbytes, stream="reduce")


def _output(layout: Layout, config: ReduceConfig) -> torch.Tensor:
    """Memory for this rank's slice of the result."""
    spec = layout.buffer
    return allocate_from(config.comm, spec.slice_numel, spec.dtype, config.device)


def _launch(output: torch.Tensor, packed: Buffer, config: ReduceConfig) -> dist.Work | None:
    launch, group, given = config.chosen.launch, config.process_group, packed.tensor
    assert launch is not None, "it was chosen"
    if LISTENERS:
        _tell(config, given.nbytes)
    if given.numel() == 0:
        return None  # the same on all ranks, so nobody waits for it
    asynchronous = config.streams.asynchronous_work
    with HiddenContext() if asynchronous and in_backward() else NOTHING:
        try:
            work = launch(output, given, group, config.scaling.op, asynchronous)
        except PeerLostError as error:
            error.say_where("reduction", config.name)
            raise
    if work is not None and not hasattr(work, "wait"):
        raise no_work(config.comm, work)
    return work
