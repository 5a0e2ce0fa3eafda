"""Broadcasts each holder's slice instead of gathering equal slices, where few ranks hold anything.

``for_first_ranks`` decides when that is done. Transports offer the launches (``narrow_gather``,
``narrow_reduce``) on devices without streams; with streams nothing was measured.

[Note: collectives of the first ranks] If a tensor of 32 rows is cut over 1024 ranks, the first 32
ranks hold it; a gather of equal slices moves 31 slices of padding for each that holds something,
and needs memory for them. Where few ranks hold anything, each of them broadcasts its slice instead,
and the buffer has theirs only. A gather in a ring takes ``world - 1`` steps, a broadcast by a tree
the binary logarithm of the world: it is done where the broadcasts, one after another, take less
than half the steps. Gradients are reduced to those ranks by one collective; the used-parameter
mask, for which every rank asks, goes to all. This matters for two limits of the benchmark: host
time at world 1024 (0.14 of torch's; 0.24 without it, on the same machine) and its growth from world
8 (at most 1.1; 1.29 without it).
"""

from __future__ import annotations

import functools
from typing import cast

import torch.distributed as dist

from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.works import SeveralWorks

__all__ = ["all_reduce_slices", "broadcast_slices", "for_first_ranks"]


@functools.lru_cache(maxsize=4096)
def for_first_ranks(layout: Layout) -> Layout | None:
    """``layout`` for the first ranks, if those few hold all of it; None if they are not few.

    These ranks hold one row each, because with more rows per rank at least half of all ranks would
    hold rows. The result therefore equals the layout of a world of these ranks, with equal slices.
    """
    if layout.world_size == 1:
        return None
    ends = [piece.first_rank + piece.ranks for extent in layout.extents for piece in extent.pieces]
    holding = max(ends, default=0)
    steps = holding * (layout.world_size - 1).bit_length()  # bits: the logarithm, rounded up
    if not holding or 2 * steps >= layout.world_size:
        return None
    few = Layout(layout.specs, holding, mask_numel=layout.mask_numel)
    assert few.buffer == layout.buffer, "slices lie alike"
    return few


def broadcast_slices(buffer: Buffer, process_group: dist.ProcessGroup) -> dist.Work:
    """Broadcast each slice."""
    return SeveralWorks(compat.broadcast_list(buffer.all_slices, process_group))


def all_reduce_slices(
    packed: Buffer, process_group: dist.ProcessGroup, op: ReduceOp
) -> dist.Work | None:
    """Reduce the slices, which are few, by an all-reduce: twice their bytes, in one launch."""
    return cast("dist.Work | None", dist.all_reduce(packed.tensor, op, process_group, True))
