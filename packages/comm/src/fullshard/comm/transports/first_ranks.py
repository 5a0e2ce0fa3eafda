"""Broadcasts each holder's slice instead of gathering equal slices, where few ranks hold anything.

Owns the question when that is done, and the launches. Refuses: devices with streams, where nothing
was measured, and collectives that are to see each buffer.

[Note: collectives of the first ranks] A row of 32 that is cut over 1024 ranks lies on the first 32;
a gather of equal slices moves 31 slices of padding for each that holds something, and needs memory
for them. Where few ranks hold anything, each of them broadcasts its slice instead, and the buffer
has theirs only. A gather in a ring takes ``world - 1`` steps, a broadcast by a tree the binary
logarithm of the world: it is done where the broadcasts, one after another, take less than half the
steps.
Gradients are reduced to those ranks likewise; the used-parameter mask, for which every rank asks,
goes to all. It carries two bars of the benchmark: host time at world 1024 (0.14 of torch's; 0.24
without it, on the same machine) and its growth from world 8 (at most 1.1; 1.29 without it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.rank_major import RankMajorLayout
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.transports.all_to_all import AllToAllTransport
from fullshard.comm.transports.transport import ProcessGroupTransport, Transport

__all__ = ["first_gatherer", "first_reducer", "for_first_ranks"]

_Launch = Callable[..., tuple[dist.Work, ...]]


@functools.lru_cache(maxsize=4096)
def for_first_ranks(layout: Layout) -> RankMajorLayout | None:
    """``layout`` for the first ranks, if those few hold all of it; None if they are not few.

    They hold one row each, as else more than half of all ranks would hold something: so it is what
    a world of that many ranks would have, and slices lie alike in both.
    """
    if not isinstance(layout, RankMajorLayout) or layout.world_size == 1:
        return None
    ends = [piece.first_rank + piece.ranks for extent in layout.extents for piece in extent.pieces]
    holding = max(ends, default=0)
    steps = holding * (layout.world_size - 1).bit_length()  # bits: the logarithm, rounded up
    if not holding or 2 * steps >= layout.world_size:
        return None
    few = RankMajorLayout(
        layout.specs, holding, mask_numel=layout.mask_numel, alignment=layout.alignment
    )
    assert few.buffer == layout.buffer, "slices lie alike"
    return few


def first_gatherer(transport: Transport, device: torch.device) -> _Launch | None:
    """What gathers the slices of the first ranks beside this transport; None: nothing does."""
    known = type(transport) in (ProcessGroupTransport, AllToAllTransport)
    return compat.broadcast_list if known and not traits_of(device).streams else None


def first_reducer(
    transport: Transport, process_group: dist.ProcessGroup, device: torch.device
) -> _Launch | None:
    """What reduces to the first ranks; nothing over gloo itself, which reduces in a ring.

    Called with slices, mask, process group and operation. In flight: in rank ``r``'s ``slices[r]``,
    everyone's reduced; in its others, anything. In the mask (``[m]``, of the dtype of the slices),
    everyone's, on ranks without a slice of their own; on those with one, anything.
    """
    if traits_of(device).streams:
        return None
    if type(transport) is AllToAllTransport:
        return _all_to_all
    gloo = compat.backend_names(process_group, device) == ("gloo",)
    return _reduce_each if type(transport) is ProcessGroupTransport and not gloo else None


def _all_to_all(
    slices: Sequence[torch.Tensor],
    mask: torch.Tensor,
    process_group: dist.ProcessGroup,
    op: ReduceOp,
) -> tuple[dist.Work, ...]:
    """One all-to-all, in which ranks without a slice are sent the mask."""
    parts = [*slices, *[mask] * (process_group.size() - len(slices))]
    return (AllToAllTransport().reduce_parts_of(parts, process_group, op),)


def _reduce_each(
    slices: Sequence[torch.Tensor],
    mask: torch.Tensor,
    process_group: dist.ProcessGroup,
    op: ReduceOp,
) -> tuple[dist.Work, ...]:
    """One reduction for each slice, and one of the mask to all."""
    works = list(compat.reduce_list(slices, process_group, op))
    if mask.numel():
        work = dist.all_reduce(mask, op, process_group, True)
        works += [] if work is None else [work]
    return tuple(works)
