"""Gradients on their way into the input of a reduction.

Owns: filling every byte of the input: gradients, mask, zeros. Refuses: launching, and deciding how
gradients are scaled (see ``scaling``).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import cast

import torch

from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.layouts import views
from fullshard.comm.layouts.scaling import ReduceScaling
from fullshard.comm.runtime import compat

__all__ = ["pack_gradients"]


def pack_gradients(
    packed: Buffer,
    gradients: Sequence[torch.Tensor | None],
    scaling: ReduceScaling,
    left_out: Collection[int] = (),
) -> None:
    """Fill a reduction's input: gradients times ``scaling.pre``, the mask, zeros for the rest.

    Args:
        packed: what is filled; it may have the slices of some ranks only.
        gradients: one per tensor of its layout, of any dtype; None: zeros.
        scaling: the factor, and what the mask holds for gradients that are there.
        left_out: numbers of gradients in whose places nothing is written, if they are there.
    """
    layout, rows, dtype = packed.layout, packed.stacked, packed.tensor.dtype
    used, given = scaling.used, gradients
    if scaling.scales_before:  # before the cast, in which values beyond its range would overflow
        pre = scaling.pre
        given = [each if each is None or each.dtype is dtype else each * pre for each in gradients]
    present = cast("Sequence[torch.Tensor]", given)
    alike = set(map(getattr, given, repeat("dtype"), repeat(None))) == {dtype}
    if rows is None or left_out or not (alike and all(map(torch.Tensor.is_contiguous, present))):
        _copy(packed, given, used, left_out)
    else:
        count = rows.shape[0]  # one row per rank
        if count < layout.world_size:
            held = views.pieces_within(layout, packed.ranks)
            both = zip(present, held, strict=True)
            present = [each.narrow(0, at.start, count * at.shard_shape[0]) for each, (at,) in both]
        behind_numel = rows.shape[1] - layout.mask_offset // dtype.itemsize
        behind = _behind(count, behind_numel, layout.mask_numel, used, dtype, rows.device)
        compat.side_by_side([*present, *behind], 0, count, out=rows)
    if scaling.scales_before:
        copied = zip(gradients, packed.pieces, strict=True)
        same = [piece for each, piece in copied if each is not None and each.dtype is dtype]
        compat.foreach_scale([view for piece in same for view in piece], scaling.pre)


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


@functools.lru_cache(maxsize=1024)
def _behind(
    ranks: int,
    numel: int,
    mask_numel: int,
    used: float,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """Return what follows the tensors in the slices of ``ranks`` with equal shards, if anything.

    Its shape is ``[ranks, numel]``: masks of ``used``, then zeros. The result is cached and
    read-only.
    """
    if not numel:
        return ()
    with torch.inference_mode(False):  # callers outside inference mode use it too
        behind = torch.zeros(ranks, numel, dtype=dtype, device=device)
        behind[:, :mask_numel] = used
    return (behind,)
