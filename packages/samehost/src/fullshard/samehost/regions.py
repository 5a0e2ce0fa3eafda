"""The reads and writes of each kind of collective in its region of shared memory.

``gather_of``, ``_reduction_of`` and ``all_reduction_of`` describe a collective, and
``launch_whole_or_in_spans`` launches it. ``shared_group`` knows when a region may be written;
``contribution`` knows the positions of gradients.

[Note: spans] A collective that needs much room travels in spans of the numbers, which follow each
other through a few slots of one small region. A rank alternately writes a span, reads another span,
and sends a message; it is at most ``_AHEAD`` spans ahead of the others. The region stays small, and
fits in the caches of the processors. The price: the call waits for the other ranks, and returns at
the end.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from fullshard.comm import ReduceOp
from fullshard.comm.spi import Contribution, Span, op_name, reduce_in_rank_order
from fullshard.samehost.collective import SharedCollective
from fullshard.samehost.group import SharedGroup
from fullshard.samehost.segment import aligned
from fullshard.samehost.signals import SPANS, MessageKind, Peer

__all__ = ["all_reduction_of", "gather_of", "launch_reduction", "launch_whole_or_in_spans"]

# Bytes of a region divided by the number of other ranks: for a reduction, what one rank reduces.
_WHOLE = 16 << 20  # up to which a collective is launched as one
_SPAN = 1 << 20  # of each span of a larger one
_AHEAD = 2  # spans


def launch_whole_or_in_spans(
    group: SharedGroup,
    numel: int,
    unit: int,
    make: Callable[[int, int], SharedCollective],
) -> dist.Work:
    """Launch the collective of ``numel`` numbers of each rank; see [Note: spans].

    Args:
        group: the ranks.
        numel: how many numbers, more than 0.
        unit: bytes of room for each.
        make: returns the collective of a span of them: where it starts, and its length.
    """
    peers, whole = group.world_size - 1, make(0, numel)
    if numel * unit <= _WHOLE * peers:
        return group.launch(whole)
    most = max(_SPAN * peers // unit, 1)
    spans = [make(start, min(most, numel - start)) for start in range(0, numel, most)]
    work = group.launch(_in_spans(group, whole, spans))
    work.wait()
    return work


def _in_spans(
    group: SharedGroup, whole: SharedCollective, spans: Sequence[SharedCollective]
) -> SharedCollective:
    """Return a collective that runs span by span once all ranks have launched it."""
    slots, room = 2 * _AHEAD, aligned(spans[0].region)

    def slot(region: torch.Tensor, number: int) -> torch.Tensor:
        return region.narrow(0, number % slots * room, spans[number].region)

    def write(region: torch.Tensor) -> None:
        for number, span in enumerate(spans[:_AHEAD]):
            span.write(slot(region, number))

    def read(region: torch.Tensor) -> None:
        with group.not_halfway:
            for number, span in enumerate(spans):
                # Every rank has written this span, and has read the span that the next one
                # overwrites.
                group.channel.wait(functools.partial(_has_done, group.spans + 1 - _AHEAD))
                ahead = number + _AHEAD
                if ahead < len(spans):
                    spans[ahead].write(slot(region, ahead))
                span.read(slot(region, number))
                group.spans += 1
                group.channel.send(MessageKind.BUFFER_LEFT, SPANS, group.spans)

    return replace(whole, region=slots * room, write=write, read=read)


def _has_done(spans: int, peer: Peer) -> bool:
    return peer.has_left_buffer(SPANS, spans)


def gather_of(
    group: SharedGroup, output: torch.Tensor, input: torch.Tensor, start: int, numel: int
) -> SharedCollective:
    """Return a gather of the ``numel`` numbers from ``start`` on: a region of a part per rank."""
    rank, world_size = group.rank, group.world_size
    whole, first, nbytes = input.nbytes, start * input.element_size(), numel * input.element_size()

    def write(region: torch.Tensor) -> None:
        region.narrow(0, rank * nbytes, nbytes).copy_(_bytes_of(input)[first : first + nbytes])

    def read(region: torch.Tensor) -> None:
        gathered = _bytes_of(output).view(world_size, -1)[:, first : first + nbytes]
        parts = region.view(world_size, -1)
        if output.data_ptr() + rank * whole != input.data_ptr():
            gathered.copy_(parts)
            return
        for others in (slice(rank), slice(rank + 1, world_size)):
            gathered[others].copy_(parts[others])

    return SharedCollective(
        kind=MessageKind.GATHER,
        nbytes=nbytes,
        detail=0,
        region=world_size * nbytes,
        write=write,
        read=read,
    )


def launch_reduction(
    group: SharedGroup,
    allocate: Callable[[], torch.Tensor],
    given: Contribution | Span,
    op: ReduceOp,
) -> dist.Work:
    """Launch a reduction; see [Note: spans].

    Args:
        group: the ranks.
        allocate: returns memory for this rank's part of the result; called once, when all ranks'
            parts, or those of a span, are there.
        given: what this rank gives.
        op: the reduction; all ranks must launch the same in one dtype.
    """
    result = functools.cache(allocate)

    def make(start: int, numel: int) -> SharedCollective:
        if numel == given.numel:
            return _reduction_of(group, allocate, given, op)
        part = given.span(start, numel)
        memory = functools.partial(_part_of, result, start, numel)
        return _reduction_of(group, memory, part, op)

    unit = group.world_size * (group.world_size - 1) * given.dtype.itemsize
    return launch_whole_or_in_spans(group, given.numel, unit, make)


def _part_of(result: Callable[[], torch.Tensor], start: int, numel: int) -> torch.Tensor:
    return result().view(-1).narrow(0, start, numel)


def _reduction_of(
    group: SharedGroup,
    allocate: Callable[[], torch.Tensor],
    given: Contribution | Span,
    op: ReduceOp,
) -> SharedCollective:
    """Return a reduction: a region with a part of each rank for every other, in rank order."""
    rank, others, dtype = group.rank, group.world_size - 1, given.dtype
    nbytes = given.numel * dtype.itemsize
    room = others * nbytes  # of one rank

    def write(region: torch.Tensor) -> None:
        mine = region.narrow(0, rank * room, room).view(dtype)
        before = rank * given.numel
        if before:
            given.write(mine.narrow(0, 0, before), range(rank))
        if rank < others:
            after = mine.narrow(0, before, mine.numel() - before)
            given.write(after, range(rank + 1, others + 1))

    def read(region: torch.Tensor) -> None:
        parts: list[torch.Tensor | None] = []
        for sender in range(others + 1):
            if sender == rank:
                parts.append(None)
                continue
            start = sender * room + (rank - (rank > sender)) * nbytes
            parts.append(region.narrow(0, start, nbytes).view(dtype))
        output = allocate()
        with torch.inference_mode(output.is_inference()):  # what it was made in
            given.reduce(parts, output.view(-1), op)

    return SharedCollective(
        kind=MessageKind.REDUCE,
        nbytes=nbytes,
        detail=zlib.crc32(f"{dtype} {op_name(op)}".encode()),
        region=(others + 1) * room,
        write=write,
        read=read,
    )


def all_reduction_of(
    group: SharedGroup, tensor: torch.Tensor, op: ReduceOp, start: int, numel: int
) -> SharedCollective:
    """Return an all-reduce of a span: a region of a part per rank; each rank reduces all."""
    flat = tensor.narrow(0, start, numel)
    rank, nbytes, dtype = group.rank, flat.nbytes, flat.dtype

    def write(region: torch.Tensor) -> None:
        region.narrow(0, rank * nbytes, nbytes).copy_(_bytes_of(flat))

    def read(region: torch.Tensor) -> None:
        parts = list(region.view(group.world_size, -1).view(dtype).unbind())
        parts[rank] = flat
        with torch.inference_mode(flat.is_inference()):
            reduce_in_rank_order(parts, flat, op)

    return SharedCollective(
        kind=MessageKind.ALL_REDUCE,
        nbytes=nbytes,
        detail=zlib.crc32(f"{dtype} {op_name(op)}".encode()),
        region=group.world_size * nbytes,
        write=write,
        read=read,
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory; detached, it may be written in and out of inference mode."""
    return tensor.detach().view(-1).view(torch.uint8)
