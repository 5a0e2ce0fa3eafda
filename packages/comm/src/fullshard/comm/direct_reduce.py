"""Reducing gradients from where autograd left them: nothing is packed that need not be.

Owns: a reduction in which each direct gradient is a collective's input, and its part of the result
lies where a packed reduction would have put it, so that what follows sees no difference. Refuses:
choosing which tensors are direct. A gradient that needs a cast, a factor or padding is written to a
buffer of its own, once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import checks, compat, views
from fullshard.comm.buffers import Buffers
from fullshard.comm.debug import check_layout
from fullshard.comm.direct import DirectLayout
from fullshard.comm.layout import TensorSpec
from fullshard.comm.observer import EventKind, emit, is_observed
from fullshard.comm.packing import pack_gradients, scale_tensors
from fullshard.comm.ranges import ranged
from fullshard.comm.rank_major import RankMajorLayout
from fullshard.comm.reduce import ReduceInFlight, ReduceLane
from fullshard.comm.scaling import is_one
from fullshard.comm.transport import ListTransport
from fullshard.comm.works import SeveralWorks

__all__ = ["foreach_reduce_direct"]


@dataclass(frozen=True)
class _Given:
    """What the collectives of one reduction read: one input each, of which some are packed."""

    inputs: list[torch.Tensor]
    packed: tuple[Buffers, ...]


@dataclass(frozen=True)
class _Taken:
    """What they write: this rank's slice of the result, and its parts, one for each input.

    The parts of direct tensors lie in ``output``; that of the rest is apart, in ``landing``.
    """

    output: torch.Tensor
    parts: list[torch.Tensor]
    landing: tuple[Buffers, ...]
    layout: DirectLayout

    def place(self) -> None:
        """Put what came for the rest where it belongs in ``output``."""
        rest, packed = self.layout.rest, self.layout.packed
        if rest is None:
            return
        itemsize = self.output.itemsize
        came = self.parts[-1]
        targets, sources = [], []
        for index, slot in zip(self.layout.others, rest.slots, strict=False):
            spec = self.layout.specs[index]
            numel = spec.chunk_rows(self.layout.world_size) * spec.row_numel
            start = packed.slots[index].offset // itemsize
            if numel:
                targets.append(self.output.narrow(0, start, numel))
                sources.append(came.narrow(0, slot.offset // itemsize, numel))
        if packed.marks:
            targets.append(views.own_marks(self.output, packed))
            sources.append(views.own_marks(came, rest))
        compat.foreach_copy(targets, sources)


@ranged("post_backward_reduce")
def foreach_reduce_direct(
    gradients: Sequence[torch.Tensor | None], layout: DirectLayout, lane: ReduceLane
) -> ReduceInFlight:
    """As ``foreach_reduce``, in a direct layout; the result is that of ``layout.packed``.

    A direct gradient is read where it lies until the reduction is over, if its dtype is the
    layout's, it is contiguous, its rows are shared evenly and nothing multiplies it before; else it
    is written to a buffer first, as the others are to theirs.

    Args:
        gradients: as for ``foreach_reduce``; nobody writes to them any more.
        layout: of one floating-point dtype, in which the reduction happens.
        lane: a collective that has a ``list_transport``; as for ``foreach_reduce``.

    Raises:
        ValueError: as ``foreach_reduce``, and if the collective moves no lists.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same collective.
    """
    rank = checks.check_world(layout, lane.process_group, lane.name)
    checks.check_gradients(gradients, layout.packed, lane.device, lane.name)
    mover = checks.require_list_transport(lane.comm, lane.process_group, lane.device, lane.name)
    check_layout(EventKind.REDUCE_SCATTER, lane.name, layout, lane.process_group, lane.scaling)
    streams = lane.streams
    owner = streams.current()
    streams.collect(owner, keep=lane.inputs_in_flight - 1)  # those travel while one is packed
    given = _give(gradients, layout, lane, rank)
    ready = streams.record(owner)
    with streams.use(streams.reduce):
        streams.reduce.wait_event(ready)
        taken = _take(layout, lane)
        work = _launch(given, taken, mover, lane)
        if work is not None and not streams.asynchronous_work:
            work.wait()  # makes the reduce stream wait, not the host
            work = None
        if work is None:
            scale_tensors(taken.output, layout.packed, lane.scaling.post)
        event = streams.record(streams.reduce)
    if work is not None:
        lent = (*given.inputs, *taken.parts)
        taken_in = (*given.packed, *taken.landing)
        return ReduceInFlight(layout.packed, lane, taken_in, taken.output, lent, work, event)
    streams.retire(given.inputs, owner, event)
    for buffers in (*given.packed, *taken.landing):
        lane.source.give_back(buffers)
    return ReduceInFlight(layout.packed, lane, (), taken.output, (), None, event)


def _give(
    gradients: Sequence[torch.Tensor | None], layout: DirectLayout, lane: ReduceLane, rank: int
) -> _Given:
    inputs: list[torch.Tensor] = []
    packed: list[Buffers] = []
    for index, alone in zip(layout.direct, layout.alone, strict=True):
        gradient = gradients[index]
        if gradient is not None and _lies_well(gradient, alone, lane):
            inputs.append(gradient.detach().view(-1))
            continue
        buffers = lane.source.take(lane.comm, alone, rank, lane.device)
        pack_gradients(buffers, [gradient], lane.scaling)
        packed.append(buffers)
        inputs.append(buffers.tensors[0])
    if layout.rest is not None:
        buffers = lane.source.take(lane.comm, layout.rest, rank, lane.device)
        _pack_rest(buffers, gradients, layout, lane)
        packed.append(buffers)
        inputs.append(buffers.tensors[0])
    if is_observed():
        nbytes = sum(buffers.tensors[0].nbytes for buffers in packed)
        emit(EventKind.COPY_IN, lane.name, rank=rank, nbytes=nbytes, stream="current")
    return _Given(inputs, tuple(packed))


def _lies_well(gradient: torch.Tensor, alone: RankMajorLayout, lane: ReduceLane) -> bool:
    (buffer,) = alone.buffers
    return (
        gradient.dtype is buffer.dtype
        and gradient.numel() == buffer.slice_numel * alone.world_size
        and is_one(lane.scaling.pre)
        and gradient.is_contiguous()
    )


def _pack_rest(
    buffers: Buffers,
    gradients: Sequence[torch.Tensor | None],
    layout: DirectLayout,
    lane: ReduceLane,
) -> None:
    if layout.others:
        pack_gradients(buffers, [gradients[index] for index in layout.others], lane.scaling)
    else:
        buffers.pad()
    if layout.marks:  # of all gradients, not only of these
        missing = [index for index, gradient in enumerate(gradients) if gradient is None]
        buffers.mark(lane.scaling.mark, missing)


def _take(layout: DirectLayout, lane: ReduceLane) -> _Taken:
    (whole,) = layout.packed.buffers
    output = checks.allocate(lane.comm, whole.slice_numel, whole.dtype, lane.device)
    lent = views.alias_of(output)
    parts = []
    for index, spec in zip(layout.direct, layout.buffers, strict=False):
        start = layout.packed.slots[index].offset // whole.dtype.itemsize
        parts.append(lent.narrow(0, start, spec.slice_numel))
    landing: tuple[Buffers, ...] = ()
    if layout.rest is not None:
        numel = layout.rest.buffers[0].slice_numel
        landing = (lane.source.take(lane.comm, _alone(numel, whole.dtype), 0, lane.device),)
        parts.append(landing[0].tensors[0])
    end = layout.packed.marks_offset // whole.dtype.itemsize + layout.marks
    output.narrow(0, end, whole.slice_numel - end).zero_()  # nothing is sent for the padding
    return _Taken(output, parts, landing, layout)


@functools.lru_cache(maxsize=1024)
def _alone(numel: int, dtype: torch.dtype) -> RankMajorLayout:
    """The layout of one rank's slice: ``numel`` elements, which are a multiple of 16 bytes."""
    return RankMajorLayout((TensorSpec(shape=(numel,), dtype=dtype),), 1)


def _launch(
    given: _Given, taken: _Taken, mover: ListTransport, lane: ReduceLane
) -> dist.Work | None:
    if is_observed():
        rank = lane.process_group.rank()
        for tensor in given.inputs:
            nbytes = tensor.nbytes
            emit(EventKind.REDUCE_SCATTER, lane.name, rank=rank, nbytes=nbytes, stream="reduce")
    with lane.streams.launching():
        works = mover.reduce_scatter_list(
            taken.parts,
            given.inputs,
            lane.process_group,
            lane.scaling.op,
            lane.streams.asynchronous_work,
        )
    if works:
        return SeveralWorks(works, taken.place)
    taken.place()
    return None
