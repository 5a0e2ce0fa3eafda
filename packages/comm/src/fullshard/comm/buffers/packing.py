"""Gradients on their way into the input of a reduction, and what is left to do to its result.

Owns: filling every byte of the input: gradients, marks, zeros. Refuses: launching, and deciding how
gradients are scaled (see ``scaling``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from fullshard.comm.buffers.buffers import Buffers
from fullshard.comm.layouts import views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.scaling import ReduceScaling, is_one
from fullshard.comm.layouts.side_by_side import tail_of
from fullshard.comm.runtime import compat

__all__ = ["pack_gradients", "scale_tensors"]


def pack_gradients(
    buffers: Buffers, gradients: Sequence[torch.Tensor | None], scaling: ReduceScaling
) -> None:
    """Fill a reduction's input: gradients times ``scaling.pre``, marks, zeros everywhere else."""
    layout, (buffer,) = buffers.layout, buffers.tensors
    plain = even = is_one(scaling.pre)
    for each in gradients:
        plain = plain and each is not None
        even = even and each is not None and each.dtype is buffer.dtype and each.is_contiguous()
    if plain:
        _pack_all(buffers, cast("Sequence[torch.Tensor]", gradients), scaling.mark, even=even)
        return
    zeroed = list(buffers.gaps)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    missing = []
    for index, (gradient, piece) in enumerate(zip(gradients, buffers.pieces, strict=True)):
        if gradient is None:
            zeroed.extend(piece)
            missing.append(index)
            continue
        if not is_one(scaling.pre) and gradient.dtype is not buffer.dtype:
            # Before the cast, in which a value beyond the reduce dtype's range would overflow.
            gradient = gradient * scaling.pre
        sources.extend(views.full_views(gradient, layout.specs[index], layout.slots[index]))
        targets.extend(piece)
    compat.foreach_zero(zeroed)
    compat.foreach_copy(targets, sources)
    if not is_one(scaling.pre):
        same = [
            target
            for target, source in zip(targets, sources, strict=True)
            if source.dtype is buffer.dtype
        ]
        compat.foreach_scale(same, scaling.pre)
    if layout.marks:
        buffers.marks.fill_(scaling.mark)
        for index in missing:
            buffers.marks[:, index].zero_()


def _pack_all(
    buffers: Buffers, gradients: Sequence[torch.Tensor], mark: float, *, even: bool
) -> None:
    """``pack_gradients`` where there is one of each, to be packed as it is.

    ``even``: all are contiguous and have the dtype in which they travel.
    """
    layout = buffers.layout
    rows = buffers.stacked if even else None
    if rows is not None:
        if mark not in buffers.tails:
            tail = tail_of(layout, mark, rows.device)
            buffers.tails[mark] = () if tail is None else (tail[: len(rows)],)
        compat.side_by_side((*gradients, *buffers.tails[mark]), rows)
        if rows.shape[0] == layout.world_size:
            return
    else:
        sources: list[torch.Tensor] = []
        for gradient, spec, slot in zip(gradients, layout.specs, layout.slots, strict=True):
            sources += views.full_views(gradient, spec, slot)
        compat.foreach_copy(buffers.all_pieces, sources)
    compat.foreach_zero(buffers.gaps)
    if layout.marks:
        buffers.marks.fill_(mark)


def scale_tensors(output: torch.Tensor, layout: Layout, factor: float | torch.Tensor) -> None:
    """Multiply the tensors of this rank's slice, not its marks."""
    if not is_one(factor):
        output[: layout.marks_offset // output.dtype.itemsize].mul_(factor)
