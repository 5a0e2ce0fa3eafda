"""Gradients on their way into the input of a reduction, and what is left to do to its result.

Owns: filling every byte of the input: gradients, mask, zeros. Refuses: launching, and deciding how
gradients are scaled (see ``scaling``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

import torch

from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.layouts import views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.scaling import ReduceScaling, is_one
from fullshard.comm.layouts.side_by_side import tail_of
from fullshard.comm.runtime import compat

__all__ = ["pack_gradients", "scale_tensors", "write_gradients"]


def pack_gradients(
    packed: Buffer, gradients: Sequence[torch.Tensor | None], scaling: ReduceScaling
) -> None:
    """Fill a reduction's input: gradients times ``scaling.pre``, mask, zeros everywhere else."""
    dtype = packed.tensor.dtype
    plain = even = is_one(scaling.pre)
    for each in gradients:
        plain = plain and each is not None
        even = even and each is not None and each.dtype is dtype and each.is_contiguous()
    if plain:
        _pack_all(packed, cast("Sequence[torch.Tensor]", gradients), scaling.used, even=even)
        return
    pre = scaling.pre
    # Before the cast, in which a value beyond the reduce dtype's range would overflow.
    given = [
        each if each is None or each.dtype is dtype or is_one(pre) else each * pre
        for each in gradients
    ]
    write_gradients(packed, given, scaling.used)
    if not is_one(pre):
        both = zip(gradients, packed.pieces, strict=True)
        same = [piece for each, piece in both if each is not None and each.dtype is dtype]
        compat.foreach_scale([view for piece in same for view in piece], pre)


def write_gradients(
    packed: Buffer,
    gradients: Sequence[torch.Tensor | None],
    used: float,
    left_out: Collection[int] = (),
) -> None:
    """Fill a reduction's input: gradients, cast, zeros everywhere else, and the mask.

    Args:
        packed: what is filled; it may have the slices of some ranks only.
        gradients: one per tensor of its layout, scaled already; None: zeros.
        used: what stands in the mask for those that are there.
        left_out: numbers of gradients in whose places nothing is written.
    """
    layout, zeroed = packed.layout, list(packed.gaps)
    held = views.pieces_within(layout, packed.ranks)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for index, (gradient, piece) in enumerate(zip(gradients, packed.pieces, strict=True)):
        if gradient is None:
            zeroed.extend(piece)
        elif index not in left_out:
            targets.extend(piece)
            sources.extend(views.full_views(gradient, layout.specs[index], held[index]))
    compat.foreach_zero(zeroed)
    compat.foreach_copy(targets, sources)
    if layout.mask_numel:
        packed.mask.fill_(used)
        for index, gradient in enumerate(gradients):
            if gradient is None:
                packed.mask[:, index].zero_()


def _pack_all(
    packed: Buffer, gradients: Sequence[torch.Tensor], used: float, *, even: bool
) -> None:
    """``pack_gradients`` where there is one of each, to be packed as it is.

    ``even``: all are contiguous and have the dtype in which they travel.
    """
    layout = packed.layout
    rows = packed.stacked if even else None
    if rows is not None:
        if used not in packed.tails:
            tail = tail_of(layout, used, rows.device)
            packed.tails[used] = () if tail is None else (tail[: len(rows)],)
        compat.side_by_side((*gradients, *packed.tails[used]), rows)
        if rows.shape[0] == layout.world_size:
            return
    else:
        sources: list[torch.Tensor] = []
        for gradient, spec, extent in zip(gradients, layout.specs, layout.extents, strict=True):
            sources += views.full_views(gradient, spec, extent.pieces)
        compat.foreach_copy(packed.all_pieces, sources)
    compat.foreach_zero(packed.gaps)
    if layout.mask_numel:
        packed.mask.fill_(used)


def scale_tensors(output: torch.Tensor, layout: Layout, factor: float | torch.Tensor) -> None:
    """Multiply the tensors of this rank's slice, not its mask."""
    if not is_one(factor):
        output[: layout.mask_offset // output.dtype.itemsize].mul_(factor)
