"""Broadcasts each holder's slice instead of gathering equal slices, where few ranks hold anything.

Owns the question when that is done, and the launches. Refuses: devices with streams, where nothing
was measured, and collectives that are to see each buffer.

[Note: narrow collectives] A row of 32 that is cut over 1024 ranks lies on the first 32; a gather of
equal slices moves 31 slices of padding for each that holds something, and needs memory for them.
Where few ranks hold anything, each of them broadcasts its slice instead, and the buffer has theirs
only. A gather in a ring takes ``world - 1`` steps, a broadcast by a tree the binary logarithm of
the world: it is done where the broadcasts, one after another, take less than half the steps.
Gradients are reduced to those ranks likewise; the used-parameter mask, for which every rank asks,
goes to all. It carries two bars of the benchmark: host time at world 1024 (0.14 of torch's; 0.24
without it, on the same machine) and its growth from world 8 (at most 1.1; 1.29 without it).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.rank_major import RankMajorLayout
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.transports.all_to_all import AllToAllTransport
from fullshard.comm.transports.transport import ProcessGroupTransport, Transport

__all__ = ["gathers_narrow", "narrowed", "reduce_narrow", "reduces_narrow"]


@functools.lru_cache(maxsize=4096)
def narrowed(layout: Layout) -> RankMajorLayout | None:
    """``layout`` for the few ranks, the first ones, that hold all of it; None if those are not few.

    They hold one row each, as else more than half of all ranks would hold something: so it is what
    a world of that many ranks would have, and slices lie alike in both.
    """
    if not isinstance(layout, RankMajorLayout) or layout.world_size == 1:
        return None
    ends = [piece.first_rank + piece.ranks for slot in layout.slots for piece in slot.pieces]
    holding = max(ends, default=0)
    steps = holding * (layout.world_size - 1).bit_length()  # bits: the logarithm, rounded up
    if not holding or 2 * steps >= layout.world_size:
        return None
    few = RankMajorLayout(layout.specs, holding, marks=layout.marks, alignment=layout.alignment)
    assert few.buffers == layout.buffers, "slices lie alike"
    return few


def gathers_narrow(transport: Transport, device: torch.device) -> bool:
    """Whether gathers of this transport are broadcasts where few ranks hold anything."""
    known = type(transport) in (ProcessGroupTransport, AllToAllTransport)
    return known and not traits_of(device).streams


def reduces_narrow(
    transport: Transport, process_group: dist.ProcessGroup, device: torch.device
) -> bool:
    """Whether reductions are; not over gloo itself, which reduces to one rank in a ring."""
    if type(transport) is ProcessGroupTransport:
        return not traits_of(device).streams and compat.backend_names(process_group, device) != (
            "gloo",
        )
    return type(transport) is AllToAllTransport and not traits_of(device).streams


def reduce_narrow(
    slices: Sequence[torch.Tensor],
    marks: torch.Tensor,
    process_group: dist.ProcessGroup,
    op: ReduceOp,
    *,
    exchange: bool,
) -> tuple[dist.Work, ...]:
    """In rank ``r``'s ``slices[r]``, everyone's reduced; in its others, anything.

    In ``marks`` (``[m]``, of the dtype of the slices), everyone's, on ranks without a slice of
    their own; on those with one, anything. ``exchange``: one all-to-all, in which ranks without a
    slice are sent the marks; else one reduction for each slice, and one of the marks to all.
    """
    if exchange:
        parts = [*slices, *[marks] * (process_group.size() - len(slices))]
        return (AllToAllTransport().reduce_parts_of(parts, process_group, op),)
    works = list(compat.reduce_list(slices, process_group, op))
    if marks.numel():
        work = dist.all_reduce(marks, op, process_group, True)
        works += [] if work is None else [work]
    return tuple(works)
