"""Gathering tensors from where they lie to where they belong: nothing is packed or unpacked.

Owns: a gather in which each direct tensor is a collective's output and each shard its input; the
tensors of the rest go the ordinary way beside them. Refuses: choosing which tensors are direct, and
memory: the caller has the outputs ready at launch.

[Note: what a direct gather reads] The collective reads a shard until it is over, not only until it
is launched. Who writes to shards waits before (``finish``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import checks
from fullshard.comm.debug import check_layout
from fullshard.comm.direct import DirectLayout
from fullshard.comm.gather import (
    AllGatherInFlight,
    FullTensors,
    GatherLane,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from fullshard.comm.observer import EventKind, emit, is_observed
from fullshard.comm.ranges import ranged
from fullshard.comm.streams import StreamEvent
from fullshard.comm.transport import ListTransport
from fullshard.comm.works import SeveralWorks

__all__ = [
    "DirectGatherInFlight",
    "DirectTensors",
    "foreach_all_gather_direct",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other classes are copied, by their own rules


class DirectTensors:
    """Full tensors that gathers of one direct layout fill, again and again.

    The memory behind them may come and go meanwhile; it is there when a gather is launched.

    Attributes:
        layout: their shapes, and which of them are direct.
        padded: the buffer of each direct tensor, ``[world * slice_numel]``.
        rest: the other tensors; None if there are none.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        padded: Sequence[torch.Tensor],
        layout: DirectLayout,
        lane: GatherLane,
    ) -> None:
        """Takes the full tensors, which have their memory now.

        Args:
            outputs: full tensors, ``layout.specs[i].shape``, contiguous; those that are not direct
                may be of another dtype.
            padded: for each of ``layout.direct``, a flat tensor of its dtype that begins with it.
            layout: which are direct.
            lane: device and name.

        Raises:
            ValueError: if they do not fit the layout.
        """
        rank = checks.check_world(layout, lane.process_group, lane.name)
        checks.check_outputs(outputs, layout, lane.device, lane.name)
        self.layout = layout
        self.padded = tuple(padded)
        _check_padded(self.padded, outputs, layout, lane.name)
        self._own = [
            buffer.narrow(0, rank * spec.slice_numel, spec.slice_numel)
            for buffer, spec in zip(self.padded, layout.buffers, strict=False)
        ]
        self.rest = None
        if layout.rest is not None:
            self.rest = FullTensors([outputs[i] for i in layout.others], layout.rest, lane)

    def inputs(self, shards: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """What each direct tensor's collective reads, and how many bytes were copied for it.

        That is the shard itself; or, where it fills less than its part, is of another dtype or not
        contiguous, the part of the output, to which it is copied.
        """
        found, copied = [], 0
        for index, own in zip(self.layout.direct, self._own, strict=True):
            shard = shards[index]
            if (
                shard.numel() == own.numel()
                and shard.dtype is own.dtype
                and type(shard) in _PLAIN
                and shard.is_contiguous()
            ):
                found.append(shard.detach().view(-1))
                continue
            if shard.numel():
                own.narrow(0, 0, shard.numel()).view(shard.shape).copy_(shard)
                copied += shard.numel() * own.itemsize
            found.append(own)
        return found, copied


def _check_padded(
    padded: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    layout: DirectLayout,
    name: str,
) -> None:
    if len(padded) != len(layout.direct):
        raise ValueError(
            f"{name or 'a gather'}: got {len(padded)} padded tensors for {len(layout.direct)} "
            "direct ones; pass one each, in the order of layout.direct"
        )
    for index, buffer, spec in zip(layout.direct, padded, layout.buffers, strict=False):
        wanted = spec.slice_numel * layout.world_size
        if (
            buffer.shape != (wanted,)
            or buffer.dtype is not spec.dtype
            or not buffer.is_contiguous()
            or outputs[index].dtype is not spec.dtype
            or outputs[index].data_ptr() != buffer.data_ptr()
        ):
            raise ValueError(
                f"{name or 'a gather'}: the padded tensor for output {index} has shape "
                f"{tuple(buffer.shape)} and {buffer.dtype}; it must be flat with {wanted} elements "
                f"of {spec.dtype} and begin with the output, which has that dtype, too"
            )


@dataclass(eq=False)
class DirectGatherInFlight:
    """A gather that was issued, straight into its outputs.

    Attributes:
        full: what it fills.
        lane: what it was issued with.
        work: the handle of the direct collectives; None once waited for, or where streams do.
        event: their end on the gather stream.
        inputs: what they read.
        rest: the gather of the other tensors; None if there are none, or once copied out.
    """

    full: DirectTensors
    lane: GatherLane
    work: dist.Work | None
    event: StreamEvent
    inputs: tuple[torch.Tensor, ...]
    rest: AllGatherInFlight | None

    @property
    def layout(self) -> DirectLayout:
        """Where everything lies."""
        return self.full.layout

    def finish(self) -> None:
        """Wait until the direct collectives read and write no more. May be called again."""
        streams = self.lane.streams
        if self.work is not None:
            work, self.work = self.work, None
            with torch.no_grad(), streams.use(streams.gather):
                work.wait()
                self.event = streams.record(streams.gather)
            streams.outlive_workers((*self.inputs, *self.full.padded))
        streams.current().wait_event(self.event)
        self.inputs = ()

    def wait(self) -> None:
        """Make the full tensors usable on the current stream. May be called again.

        Without streams it blocks until they are there.
        """
        self.finish()
        rest, self.rest = self.rest, None
        if rest is not None:
            assert self.full.rest is not None, "its layout has a rest"
            foreach_all_gather_copy_out(rest, self.full.rest)

    def discard(self) -> None:
        """Wait for a gather that nobody wants."""
        self.finish()
        rest, self.rest = self.rest, None
        if rest is not None:
            rest.discard()


@ranged("all_gather")
def foreach_all_gather_direct(
    shards: Sequence[torch.Tensor],
    full: DirectTensors,
    lane: GatherLane,
    *,
    async_op: bool = False,
) -> DirectGatherInFlight:
    """A gather in flight, after which the full tensors hold every rank's shards.

    One collective for each direct tensor, coalesced where the backend can, and one for the rest.
    The shards must stay as they are until ``finish()``; what the current stream wrote to them
    before is seen.

    Args:
        shards: this rank's shard of each tensor, ``layout.specs[i].shard_shape(rank)``, any dtype.
        full: what to fill; its memory is there, and nobody uses it.
        lane: a collective that has a ``list_transport``, ranks, streams.
        async_op: ask for work handles on accelerators too.

    Raises:
        ValueError: if shards do not fit the layout or the device, or the collective moves no lists.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same collective.
    """
    layout = full.layout
    rank = checks.check_world(layout, lane.process_group, lane.name)
    checks.check_shards(shards, layout, lane.device, rank, lane.name)
    mover = checks.require_list_transport(lane.comm, lane.process_group, lane.device, lane.name)
    check_layout(EventKind.ALL_GATHER, lane.name, layout, lane.process_group)
    rest = None
    if layout.rest is not None:
        others = [shards[index] for index in layout.others]
        rest = foreach_all_gather(others, layout.rest, lane, async_op=async_op)
    streams = lane.streams
    owner = streams.record()  # of the outputs' memory
    with streams.use(streams.gather):
        streams.gather.wait_event(owner)
        streams.gather.wait_event(streams.record(streams.copy_in))
        inputs, copied = full.inputs(shards)
        if copied and is_observed():
            emit(EventKind.COPY_IN, lane.name, rank=rank, nbytes=copied, stream="gather")
        works = _launch(full.padded, inputs, mover, lane, async_op)
        event = streams.record(streams.gather)
    work = SeveralWorks(works) if works else None
    return DirectGatherInFlight(full, lane, work, event, tuple(inputs), rest)


def _launch(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    mover: ListTransport,
    lane: GatherLane,
    async_op: bool,
) -> tuple[dist.Work, ...]:
    if is_observed():
        rank = lane.process_group.rank()
        for output in outputs:
            nbytes = output.nbytes
            emit(EventKind.ALL_GATHER, lane.name, rank=rank, nbytes=nbytes, stream="gather")
    with lane.streams.launching():
        return mover.all_gather_list(
            outputs, inputs, lane.process_group, async_op or lane.streams.asynchronous_work
        )
