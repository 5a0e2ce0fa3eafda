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
from fullshard.comm.layouts.side_by_side import even_ranks
from fullshard.comm.runtime import compat

__all__ = ["pack_gradients", "scale_tensors"]


def pack_gradients(
    buffers: Buffers, gradients: Sequence[torch.Tensor | None], scaling: ReduceScaling
) -> None:
    """Fill a reduction's input: gradients times ``scaling.pre``, marks, zeros everywhere else."""
    layout, (buffer,) = buffers.layout, buffers.tensors
    if is_one(scaling.pre) and all(each is not None for each in gradients):
        _pack_all(buffers, cast("Sequence[torch.Tensor]", gradients), scaling)
        return
    buffers.pad()
    zeroed: list[torch.Tensor] = []
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
        buffers.mark(scaling.mark, missing)


def _pack_all(buffers: Buffers, gradients: Sequence[torch.Tensor], scaling: ReduceScaling) -> None:
    """``pack_gradients`` where there is one of each, to be packed as it is."""
    layout, dtype = buffers.layout, buffers.tensors[0].dtype
    ranks = even_ranks(layout)
    if ranks and all(each.dtype is dtype and each.is_contiguous() for each in gradients):
        compat.side_by_side((*gradients, *buffers.tail(scaling.mark)), buffers.stacked)
        if ranks == buffers.ranks:
            buffers.marked = None
            return
    else:
        sources: list[torch.Tensor] = []
        for gradient, spec, slot in zip(gradients, layout.specs, layout.slots, strict=True):
            sources += views.full_views(gradient, spec, slot)
        compat.foreach_copy(buffers.all_pieces, sources)
    buffers.pad()
    if layout.marks:
        buffers.mark(scaling.mark, ())


def scale_tensors(output: torch.Tensor, layout: Layout, factor: float | torch.Tensor) -> None:
    """Multiply the tensors of this rank's slice, not its marks."""
    if not is_one(factor):
        output[: layout.marks_offset // output.dtype.itemsize].mul_(factor)
