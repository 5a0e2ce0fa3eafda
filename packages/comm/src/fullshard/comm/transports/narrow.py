"""Collectives of which only the first few ranks hold, or get, a part.

Owns the question when such a collective is made of few launches from or to those ranks, and who can
make it. Refuses: launching (``gather`` and ``reduce`` do) and moving bytes (transports do).

[Note: narrow collectives] A row of 32 that is cut over 1024 ranks lies on the first 32; a gather of
equal slices moves 31 slices of padding for each that holds something, and needs memory for them.
Where few ranks hold anything, each of them broadcasts its slice instead, and the buffer has theirs
only. A gather in a ring takes ``world - 1`` steps, a broadcast by a tree the binary logarithm of
the world: it is done where the broadcasts, one after another, take less than half the steps. They
move fewer bytes then, too. Gradients are reduced to those ranks likewise; marks, for which every
rank asks, go to all. Over gloo that is one exchange with parts of two sizes: gloo reduces to one
rank in a ring, so its own reductions stay as they are. Gloo on CPU was measured
(``benchmarks/notes.md``); on devices with streams nothing was, and there nothing is narrow.
"""

from __future__ import annotations

import functools
from typing import cast

import torch
import torch.distributed as dist

from fullshard.comm.layouts.layout import Layout
from fullshard.comm.transports.collective import AllGatherLike, ReduceScatterLike
from fullshard.comm.transports.transport import NarrowTransport

__all__ = ["few_ranks", "narrow_transport_of"]


@functools.lru_cache(maxsize=4096)
def few_ranks(layout: Layout) -> int:
    """How many ranks, the first ones, hold all of a layout, if those are few; else 0.

    See [Note: narrow collectives].
    """
    if layout.world_size == 1 or len(layout.buffers) > 1:
        return 0
    ends = [piece.first_rank + piece.ranks for slot in layout.slots for piece in slot.pieces]
    holding = max(ends, default=0)
    steps = holding * (layout.world_size - 1).bit_length()  # bits: the logarithm, rounded up
    return holding if 2 * steps < layout.world_size else 0


def narrow_transport_of(
    layout: Layout,
    comm: AllGatherLike | ReduceScatterLike,
    process_group: dist.ProcessGroup,
    device: torch.device,
    *,
    reduces: bool,
) -> NarrowTransport | None:
    """What moves the slices of ``few_ranks`` instead of ``comm``; None where that is not to be.

    So it is where those are not few, and where ``comm`` cannot, or is to be called itself. A
    collective call where the collective's transport makes it one: all ranks find the same.
    """
    if not few_ranks(layout):
        return None
    finder = getattr(comm, "narrow_transport", None)
    found = None if finder is None else finder(process_group, device, reduces=reduces)
    return cast("NarrowTransport | None", found)
