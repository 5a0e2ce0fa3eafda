"""Reducing a list of gradients in one launch.

Owns: the order of pack, reduce-scatter and scaling, on which stream each runs, and what stays alive
meanwhile. What exists only while a reduction runs is in one object, ``ReduceInFlight``. Refuses:
knowing what the tensors are, deciding how they are scaled (see ``scaling``), and accumulating. What
can be wrong with the arguments is raised before any collective is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import allocate_from
from fullshard.comm.buffers.buffers import Buffers
from fullshard.comm.buffers.packing import pack_gradients, scale_tensors
from fullshard.comm.collectives.composed import DefaultReduceScatter
from fullshard.comm.debug.debug import DEBUGGED, check_layout
from fullshard.comm.layouts import checks, views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime.compat import HiddenContext, in_backward
from fullshard.comm.runtime.observer import LISTENERS, EventKind, emit
from fullshard.comm.runtime.ranges import NOTHING, is_profiled, without_grad_in_range
from fullshard.comm.runtime.streams import StreamEvent
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.same_host.shared_signals import PeerLostError
from fullshard.comm.transports.all_to_all import AllToAllTransport
from fullshard.comm.transports.collective import ReduceScatter, no_work
from fullshard.comm.transports.config import ReduceConfig
from fullshard.comm.transports.contribution import Contribution, PartsReducer
from fullshard.comm.transports.narrow import narrowed, reduce_narrow, reduces_narrow
from fullshard.comm.transports.rank_order import is_reduction

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
            shards=views.shards_of(output, layout, rank),
            marks=views.own_marks(output, layout) if layout.marks else None,
            output=output,
        )


@dataclass(eq=False)
class ReduceInFlight:
    """A reduction that was issued. ``wait()`` gives its result.

    Attributes:
        layout: where things lie.
        config: what it was issued with.
        inputs: the packed gradients, and what else of ``config.source`` an asynchronous collective
            uses, kept until it is over; none after, or where streams keep them.
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
    inputs: tuple[Buffers, ...]
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
        packed, self.inputs = self.inputs, ()
        for buffers in packed:
            if not self.config.source.give_back(buffers):
                tensors += buffers.drop_views()
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
            for a slot of zeros.
        layout: where things lie: one buffer of one floating-point dtype, in which the reduction
            happens. With ``layout.marks == len(gradients)``, mark ``i`` tells whether any rank had
            gradient ``i``.
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
        if config.chosen.launch is None:
            _choose(config)
        if config.chosen.parts is not None and layout.buffers[0].slice_numel:
            in_parts = _reduce_parts(gradients, layout, config, config.chosen.parts)
            if in_parts is not None:
                return in_parts
        few = narrowed(layout) if config.chosen.narrow else None
        if few is not None:
            return _reduce_narrow(gradients, layout, few, config)
        if not config.streams.asynchronous_work:
            return _reduce_on_streams(gradients, layout, config)
        buffers = config.source.take(config.comm, layout, rank, config.device)
        pack_gradients(buffers, gradients, config.scaling)
        output = _output(layout, config)
        lent = views.alias_of(output)
        work = _launch(lent, buffers, config)
        if work is not None:
            return ReduceInFlight(layout, config, (buffers,), output, (lent,), work, None)
        scale_tensors(output, layout, config.scaling.post)
        config.source.give_back(buffers)
        return ReduceInFlight(layout, config, (), output, (), None, None)


def _reduce_on_streams(
    gradients: Sequence[torch.Tensor | None], layout: Layout, config: ReduceConfig
) -> ReduceInFlight:
    """The reduction in flight, on a device whose streams wait for each other."""
    streams, rank = config.streams, config.process_group.rank()
    owner = streams.current()
    streams.collect(owner, keep=config.inputs_in_flight - 1)  # those travel while one is packed
    buffers = config.source.take(config.comm, layout, rank, config.device)
    pack_gradients(buffers, gradients, config.scaling)
    packed = streams.record(owner)
    with streams.use(streams.reduce):
        streams.reduce.wait_event(packed)
        output = _output(layout, config)
        work = _launch(views.alias_of(output), buffers, config)
        if work is not None:
            work.wait()  # makes the reduce stream wait, not the host
        scale_tensors(output, layout, config.scaling.post)
        event = streams.record(streams.reduce)
    if not config.source.give_back(buffers):
        streams.retire(buffers.tensors, owner, event)
    return ReduceInFlight(layout, config, (), output, (), None, event)


def _reduce_narrow(
    gradients: Sequence[torch.Tensor | None], layout: Layout, few: Layout, config: ReduceConfig
) -> ReduceInFlight:
    """The reduction in flight to the few that get a part; see [Note: narrow collectives]."""
    process_group = config.process_group
    rank = process_group.rank()
    buffers = config.source.take(config.comm, few, min(rank, few.world_size - 1), config.device)
    pack_gradients(buffers, gradients, config.scaling)
    marks = buffers.marks[0].clone()  # which every rank asks for
    if LISTENERS:
        nbytes = buffers.tensors[0].nbytes
        emit(EventKind.COPY_IN, config.name, rank=rank, nbytes=nbytes, stream="current")
        emit(EventKind.REDUCE_SCATTER, config.name, rank=rank, nbytes=nbytes, stream="reduce")
    output = _output(layout, config)
    with HiddenContext() if in_backward() else NOTHING:
        works = reduce_narrow(
            buffers.all_slices,
            marks,
            process_group,
            config.scaling.op,
            exchange=config.chosen.exchanges,
        )

    def land() -> None:
        if rank < few.world_size:
            output.copy_(buffers.all_slices[rank])
        else:
            views.own_marks(output, layout).copy_(marks)

    work, lent = SeveralWorks(works, land), (marks, *buffers.all_slices)
    return ReduceInFlight(layout, config, (buffers,), output, lent, work, None)


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
    flight = ReduceInFlight(layout, config, (), None, (), None, event)
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
        nbytes = layout.buffers[0].slice_nbytes * layout.world_size
        emit(EventKind.COPY_IN, config.name, rank=rank, nbytes=nbytes, stream="current")
        emit(EventKind.REDUCE_SCATTER, config.name, rank=rank, nbytes=nbytes, stream="reduce")
    return flight


def _output(layout: Layout, config: ReduceConfig) -> torch.Tensor:
    """Memory for this rank's slice of the result."""
    spec = layout.buffers[0]
    return allocate_from(config.comm, spec.slice_numel, spec.dtype, config.device)


def _launch(output: torch.Tensor, buffers: Buffers, config: ReduceConfig) -> dist.Work | None:
    (packed,), streams = buffers.tensors, config.streams
    if LISTENERS:
        nbytes, rank = packed.nbytes, buffers.rank
        emit(EventKind.COPY_IN, config.name, rank=rank, nbytes=nbytes, stream="current")
        if nbytes:
            emit(EventKind.REDUCE_SCATTER, config.name, rank=rank, nbytes=nbytes, stream="reduce")
    if packed.numel() == 0:
        return None  # the same on all ranks, so nobody waits for it
    asynchronous = streams.asynchronous_work
    assert config.chosen.launch is not None, "it was chosen"
    with HiddenContext() if asynchronous and in_backward() else NOTHING:
        try:
            work = config.chosen.launch(
                output, packed, config.process_group, config.scaling.op, asynchronous
            )
        except PeerLostError as error:
            error.say_where("reduction", config.name)
            raise
    if work is not None and not hasattr(work, "wait"):
        raise no_work(config.comm, work)
    return work


def _choose(config: ReduceConfig) -> None:
    """Chooses who is called from now on; see ``Chosen``."""
    comm, group, op = config.comm, config.process_group, config.scaling.op
    transport = None
    if isinstance(comm, DefaultReduceScatter) and is_reduction(op):
        transport = comm.serving(group, config.device)
        if transport is not None and comm.reusable:
            config.chosen.narrow = reduces_narrow(transport, group, config.device)
            config.chosen.exchanges = type(transport) is AllToAllTransport
    finder = getattr(comm, "parts_reducer", None)
    config.chosen.parts = None if finder is None else finder(group, config.device, op)
    config.chosen.launch = _by_name(comm) if transport is None else transport.reduce_scatter


def _by_name(comm: ReduceScatter) -> Callable[..., dist.Work | None]:
    """Calls a collective by the names of its arguments, as it was checked for."""

    def launch(
        output: torch.Tensor,
        packed: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool,
    ) -> dist.Work | None:
        return comm(
            output_tensor=output, input_tensor=packed, group=group, op=op, async_op=async_op
        )

    return launch
