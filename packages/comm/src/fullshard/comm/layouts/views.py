"""Views of flat buffers and of full tensors that match, so that packing is a plain copy.

Owns: turning a layout's arithmetic into strided tensors. Refuses: communication, allocation, and
knowing why a copy is made. Strides are worked out once per layout and kept; making a view is then
one ``as_strided`` call.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from fullshard.comm.layouts.layout import Layout, Piece, TensorSpec

__all__ = [
    "divides_evenly",
    "full_views",
    "gap_views",
    "mask_view",
    "own_mask",
    "piece_views",
    "pieces_within",
    "shard_plan",
    "shard_views",
]


@dataclass(frozen=True, slots=True)
class _Strided:
    """An ``as_strided`` call to be: offset counts elements of ``dtype`` from the buffer's start."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _viewed(buffer: torch.Tensor, plans: Sequence[_Strided]) -> list[torch.Tensor]:
    """The planned views; the buffer itself is seen through each dtype once."""
    bases = {buffer.dtype: buffer}
    views = []
    for plan in plans:
        if plan.dtype not in bases:
            with torch.inference_mode(False):  # training uses these views too
                bases[plan.dtype] = buffer.view(plan.dtype)
        base = bases[plan.dtype]
        start = int(base.storage_offset()) + plan.offset
        views.append(base.as_strided(plan.size, plan.stride, start))
    return views


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@functools.lru_cache(maxsize=4096)
def shard_plan(layout: Layout, rank: int) -> tuple[_Strided, ...]:
    """The views of the shards of ``rank`` in its slice, as a plan."""
    plans = []
    for spec, extent in zip(layout.specs, layout.extents, strict=True):
        shape = spec.shard_shape(rank, layout.world_size)
        offset = extent.offset // spec.dtype.itemsize if math.prod(shape) else 0
        plans.append(_Strided(spec.dtype, shape, _contiguous_strides(shape), offset))
    return tuple(plans)


def _within(piece: Piece, ranks: range, dim: int) -> Piece | None:
    """The part of ``piece`` that consecutive ``ranks`` hold, if any."""
    first = max(piece.first_rank, ranks.start)
    count = min(piece.first_rank + piece.ranks, ranks.stop) - first
    if count <= 0:
        return None
    start = piece.start + (first - piece.first_rank) * piece.shard_shape[dim]
    return replace(piece, first_rank=first, ranks=count, start=start)


@functools.lru_cache(maxsize=4096)
def pieces_within(layout: Layout, ranks: range) -> tuple[tuple[Piece, ...], ...]:
    """Per tensor, its pieces as far as consecutive ``ranks`` hold them."""
    return tuple(
        tuple(part for piece in extent.pieces if (part := _within(piece, ranks, spec.dim)))
        for spec, extent in zip(layout.specs, layout.extents, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def _piece_plan(layout: Layout, ranks: range) -> tuple[tuple[_Strided, ...], ...]:
    """The pieces in a buffer that holds the slices of ``ranks`` only."""
    plans = []
    slice_nbytes = layout.buffer.slice_nbytes
    parts = pieces_within(layout, ranks)
    for spec, extent, held in zip(layout.specs, layout.extents, parts, strict=True):
        itemsize, pieces = spec.dtype.itemsize, []
        for piece in held:
            first = piece.first_rank - ranks.start
            offset = (first * slice_nbytes + extent.offset) // itemsize
            stride = (slice_nbytes // itemsize, *_contiguous_strides(piece.shard_shape))
            pieces.append(_Strided(spec.dtype, piece.stacked_shape, stride, offset))
        plans.append(tuple(pieces))
    return tuple(plans)


@functools.lru_cache(maxsize=4096)
def _gap_plan(layout: Layout, within: range) -> tuple[_Strided, ...]:
    """The parts of the buffer outside shards and mask, as ``[ranks, n]`` in the buffer's dtype.

    The buffer holds the slices of the ranks ``within`` only.
    """
    buffer, itemsize = layout.buffer, layout.buffer.dtype.itemsize
    end_of_mask = layout.mask_offset + layout.mask_numel * itemsize
    always = [(0, 0), (layout.mask_offset, end_of_mask), (buffer.slice_nbytes,) * 2]
    pieces = [piece for held in pieces_within(layout, within) for piece in held]
    ends = {end for each in pieces for end in (each.first_rank, each.first_rank + each.ranks)}
    plans = []
    for first, last in itertools.pairwise(sorted({within.start, within.stop, *ends})):
        filled = list(always)  # first byte, last + 1: alike for the ranks from first to last
        for spec, extent in zip(layout.specs, layout.extents, strict=True):
            shard = math.prod(spec.shard_shape(first, layout.world_size))
            if shard:
                filled.append((extent.offset, extent.offset + shard * spec.dtype.itemsize))
        for (_, start), (end, _) in itertools.pairwise(sorted(filled)):
            if start < end:
                size = (last - first, (end - start) // itemsize)
                offset = (first - within.start) * buffer.slice_numel + start // itemsize
                plans.append(_Strided(buffer.dtype, size, (buffer.slice_numel, 1), offset))
    return tuple(plans)


@functools.lru_cache(maxsize=4096)
def divides_evenly(layout: Layout) -> bool:
    """Return whether every tensor is cut on dim 0, into equal shards, stored in this order.

    Then the slices are the tensors, seen as ``[world_size, -1]``, side by side.
    """
    end = 0
    for spec, extent in zip(layout.specs, layout.extents, strict=True):
        even = spec.shape and spec.numel and not spec.dim and spec.rows % layout.world_size == 0
        if not even or extent.offset != end:
            return False
        end += spec.numel // layout.world_size * spec.dtype.itemsize
    return end == layout.mask_offset


def shard_views(slice_buffer: torch.Tensor, layout: Layout, rank: int) -> list[torch.Tensor]:
    """Per tensor, the view of ``rank``'s own shard in its slice, ``[slice_numel]``."""
    return _viewed(slice_buffer, shard_plan(layout, rank))


def piece_views(
    buffer: torch.Tensor, layout: Layout, ranks: range, left_out: Collection[int] = ()
) -> list[list[torch.Tensor]]:
    """Per tensor, the view ``[piece.ranks, *piece.shard_shape]`` of each of its pieces.

    Args:
        buffer: the slices of ``ranks``, flat.
        layout: where things lie.
        ranks: consecutive ranks.
        left_out: numbers of tensors of which no view is wanted.
    """
    plans = enumerate(_piece_plan(layout, ranks))
    return [[] if at in left_out else _viewed(buffer, pieces) for at, pieces in plans]


def full_views(full: torch.Tensor, spec: TensorSpec, pieces: Sequence[Piece]) -> list[torch.Tensor]:
    """The views of a full tensor that match ``piece_views``, for any dim and stride.

    Views: ``full.narrow(dim, start, ranks * rows).unflatten(dim, (ranks, rows)).movedim(dim, 0)``.

    Args:
        full: the full tensor, of ``spec.shape``, or flat with ``spec.numel`` contiguous elements.
        spec: the tensor's spec.
        pieces: those of its extent, or of some ranks (``pieces_within``).
    """
    shape, dim = spec.laid_shape, spec.dim
    if dim == 0 and len(pieces) == 1 and full.is_contiguous():
        (piece,) = pieces
        if piece.ranks * piece.shard_shape[0] == shape[0]:
            return [full.view(piece.stacked_shape)]
    if full.shape != shape:
        full = full.view(shape)
    strides, start = full.stride(), full.storage_offset()
    row = strides[dim]
    return [
        full.as_strided(
            piece.stacked_shape,
            (piece.shard_shape[dim] * row, *strides),
            start + piece.start * row,
        )
        for piece in pieces
    ]


def gap_views(buffer: torch.Tensor, layout: Layout, ranks: range) -> list[torch.Tensor]:
    """Views ``[ranks, n]`` of all that no shard and no mask fills: a reduction must zero it.

    Args:
        buffer: as for ``piece_views``.
        layout: where things lie.
        ranks: as for ``piece_views``.
    """
    return _viewed(buffer, _gap_plan(layout, ranks))


def mask_view(buffer: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The used-parameter masks, ``[slices, mask_numel]``: one row per slice that it holds."""
    spec = layout.buffer
    first = layout.mask_offset // spec.dtype.itemsize
    return buffer.view(-1, spec.slice_numel).narrow(1, first, layout.mask_numel)


def own_mask(output: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The used-parameter mask in one rank's slice, ``[mask_numel]``."""
    return output.narrow(0, layout.mask_offset // output.dtype.itemsize, layout.mask_numel)
