"""Gradients on their way into the input of a reduction.

Owns: filling every byte of the input: gradients, mask, zeros. Refuses: launching, and deciding how
gradients are scaled (see ``scaling``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import repeat
from typing import cast

import torch

from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.layouts import views
from fullshard.comm.layouts.scaling import ReduceScaling
from fullshard.comm.layouts.side_by_side import tail_of
from fullshard.comm.runtime import compat

__all__ = ["pack_gradients", "write_gradients"]


def pack_gradients(
    packed: Buffer,
    gradients: Sequence[torch.Tensor | None],
    scaling: ReduceScaling,
    left_out: Collection[int] = (),
) -> None:
    """Fill a reduction's input: gradients times ``scaling.pre``, the mask, zeros for the rest.

    In the places of the gradients ``left_out`` nothing is written.
    """
    if not scaling.scales_before:
        write_gradients(packed, gradients, scaling.used, left_out)
        return
    dtype, pre = packed.tensor.dtype, scaling.pre
    # Before the cast, in which a value beyond the reduce dtype's range would overflow.
    given = [each if each is None or each.dtype is dtype else each * pre for each in gradients]
    write_gradients(packed, given, scaling.used, left_out)
    both = zip(gradients, packed.pieces, strict=True)
    same = [piece for each, piece in both if each is not None and each.dtype is dtype]
    compat.foreach_scale([view for piece in same for view in piece], pre)


def write_gradients(
    packed: Buffer,
    gradients: Sequence[torch.Tensor | None],
    used: float,
    left_out: Collection[int] = (),
) -> None:
    """Fill a reduction's input: cast gradients, the mask, and zeros for the rest.

    Args:
        packed: what is filled; it may have the slices of some ranks only.
        gradients: one per tensor of its layout, scaled already; None: zeros.
        used: what stands in the mask for those that are there.
        left_out: numbers of gradients in whose places nothing is written, if they are there.
    """
    layout, rows, dtype = packed.layout, packed.stacked, packed.tensor.dtype
    present = cast("Sequence[torch.Tensor]", gradients)
    alike = set(map(getattr, gradients, repeat("dtype"), repeat(None))) == {dtype}
    if rows is None or left_out or not (alike and all(map(torch.Tensor.is_contiguous, present))):
        _copy(packed, gradients, used, left_out)
        return
    first, count = packed.ranks.start, rows.shape[0]  # one row per rank
    if len(packed.ranks) < layout.world_size:
        held = views.pieces_within(layout, range(first, first + count))
        both = zip(present, held, strict=True)
        present = [each.narrow(0, at.start, count * at.shard_shape[0]) for each, (at,) in both]
    if used not in packed.tails:
        tail = tail_of(layout, used, rows.device)
        packed.tails[used] = () if tail is None else (tail.narrow(0, first, count),)
    compat.side_by_side([*present, *packed.tails[used]], 0, count, out=rows)
    if count < len(packed.ranks):
        compat.foreach_zero(packed.gaps)
        packed.mask.fill_(used)


def _copy(
    packed: Buffer,
    gradients: Sequence[torch.Tensor | None],
    used: float,
    left_out: Collection[int],
) -> None:
    layout, zeroed = packed.layout, list(packed.gaps)
    tensor, ranks = packed.tensor, packed.ranks
    held = views.pieces_within(layout, ranks)
    skipped = {index for index in left_out if gradients[index] is not None}
    pieces = views.piece_views(tensor, layout, ranks, skipped) if skipped else packed.pieces
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for index, (gradient, piece) in enumerate(zip(gradients, pieces, strict=True)):
        if gradient is None:
            zeroed.extend(piece)
        elif index not in skipped:
            targets.extend(piece)
            sources.extend(views.full_views(gradient, layout.specs[index], held[index]))
    compat.foreach_zero(zeroed)
    compat.foreach_copy(targets, sources)
    if layout.mask_numel:
        packed.mask.fill_(used)
        for index, gradient in enumerate(gradients):
            if gradient is None:
                packed.mask[:, index].zero_()
