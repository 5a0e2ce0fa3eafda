"""Views of flat buffers and of full tensors that match, so that packing is a plain copy.

Owns: turning a layout's arithmetic into strided tensors. Refuses: communication, allocation, and
knowing why a copy is made. Strides are worked out once per layout and kept; making a view is then
one ``as_strided`` call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fullshard.comm.layouts.layout import Layout, Piece, Slot, TensorSpec

__all__ = [
    "alias_of",
    "full_views",
    "full_views_for",
    "gap_views",
    "marks_view",
    "own_marks",
    "piece_views",
    "shard_shapes",
    "shard_views",
    "shards_of",
    "tensors_view",
]


@dataclass(frozen=True, slots=True)
class _Strided:
    """An ``as_strided`` call to be: offset counts elements of ``dtype`` from the buffer's start."""

    buffer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Typed:
    """The same buffers seen through each dtype that a layout asks for, made on demand."""

    def __init__(self, buffers: tuple[torch.Tensor, ...]) -> None:
        self._buffers = buffers
        self._typed: dict[tuple[int, torch.dtype], tuple[torch.Tensor, int]] = {}

    def view(self, plan: _Strided) -> torch.Tensor:
        key = (plan.buffer, plan.dtype)
        if key not in self._typed:
            base = self._buffers[plan.buffer]
            base = base if base.dtype is plan.dtype else base.view(plan.dtype)
            self._typed[key] = (base, int(base.storage_offset()))
        base, start = self._typed[key]
        return base.as_strided(plan.size, plan.stride, start + plan.offset)

    def views(self, plans: tuple[_Strided, ...]) -> list[torch.Tensor]:
        """The views of several plans; quickly where all are of one buffer and its dtype."""
        base = self._buffers[0]
        if len(self._buffers) > 1 or any(plan.dtype is not base.dtype for plan in plans):
            return [self.view(plan) for plan in plans]
        start = int(base.storage_offset())
        return [base.as_strided(plan.size, plan.stride, start + plan.offset) for plan in plans]


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@functools.lru_cache(maxsize=4096)
def shard_shapes(layout: Layout, rank: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of ``rank``'s shards, one per tensor of the layout.

    Raises:
        ValueError: if ``rank`` is outside the layout's world.
    """
    return tuple(spec.shard_shape(rank, layout.world_size) for spec in layout.specs)


@functools.lru_cache(maxsize=4096)
def _shard_plan(layout: Layout, rank: int) -> tuple[_Strided, ...]:
    plans = []
    shapes = shard_shapes(layout, rank)
    for spec, slot, shape in zip(layout.specs, layout.slots, shapes, strict=True):
        offset = slot.offset // spec.dtype.itemsize if math.prod(shape) else 0
        plans.append(_Strided(slot.buffer, spec.dtype, shape, _contiguous_strides(shape), offset))
    return tuple(plans)


def _within(piece: Piece, ranks: range, dim: int) -> Piece | None:
    """The part of ``piece`` that consecutive ``ranks`` hold, if any."""
    first = max(piece.first_rank, ranks.start)
    count = min(piece.first_rank + piece.ranks, ranks.stop) - first
    if count <= 0:
        return None
    start = piece.start + (first - piece.first_rank) * piece.shard_shape[dim]
    return Piece(first_rank=first, ranks=count, start=start, shard_shape=piece.shard_shape)


@functools.lru_cache(maxsize=4096)
def _pieces_of(layout: Layout, ranks: range) -> tuple[tuple[Piece, ...], ...]:
    """Per tensor, its pieces as far as consecutive ``ranks`` hold them."""
    return tuple(
        tuple(part for piece in slot.pieces if (part := _within(piece, ranks, spec.dim)))
        for spec, slot in zip(layout.specs, layout.slots, strict=True)
    )


@functools.lru_cache(maxsize=4096)
def _piece_plan(layout: Layout, ranks: range) -> tuple[tuple[_Strided, ...], ...]:
    """The pieces in buffers that hold the slices of ``ranks`` only."""
    plans = []
    parts = _pieces_of(layout, ranks)
    for spec, slot, held in zip(layout.specs, layout.slots, parts, strict=True):
        itemsize = spec.dtype.itemsize
        slice_nbytes = layout.buffers[slot.buffer].slice_nbytes
        pieces = []
        for piece in held:
            first = piece.first_rank - ranks.start
            offset = (first * slice_nbytes + slot.offset) // itemsize
            size = (piece.ranks, *piece.shard_shape)
            stride = (slice_nbytes // itemsize, *_contiguous_strides(piece.shard_shape))
            pieces.append(_Strided(slot.buffer, spec.dtype, size, stride, offset))
        plans.append(tuple(pieces))
    return tuple(plans)


@functools.lru_cache(maxsize=4096)
def _gap_plan(layout: Layout, ranks: range) -> tuple[_Strided, ...]:
    """``_all_gaps`` in buffers that hold the slices of ``ranks`` only."""
    gaps = []
    for gap in _all_gaps(layout):
        first, start = divmod(gap.offset, gap.stride[0])
        low, high = max(first, ranks.start), min(first + gap.size[0], ranks.stop)
        if low < high:
            offset = (low - ranks.start) * gap.stride[0] + start
            gaps.append(replace(gap, size=(high - low, gap.size[1]), offset=offset))
    return tuple(gaps)


@functools.lru_cache(maxsize=4096)
def _all_gaps(layout: Layout) -> tuple[_Strided, ...]:
    """All that is neither a shard's element nor a mark, as ``[ranks, n]`` in the buffer's dtype."""
    gaps = []
    for index, buffer in enumerate(layout.buffers):
        itemsize, stride = buffer.dtype.itemsize, buffer.slice_numel
        used: list[tuple[int, int]] = []  # (first, last + 1) byte of a slice that full chunks fill
        for spec, slot in zip(layout.specs, layout.slots, strict=True):
            if slot.buffer != index or not slot.pieces:
                continue
            chunk = spec.chunk_rows(layout.world_size) * spec.row_numel * spec.dtype.itemsize
            used.append((slot.offset, slot.offset + chunk))
            for first, ranks, start, end in _ragged(spec, slot, layout.world_size, chunk):
                offset = first * stride + (slot.offset + start) // itemsize
                size = (ranks, (end - start) // itemsize)
                gaps.append(_Strided(index, buffer.dtype, size, (stride, 1), offset))
        if index == len(layout.buffers) - 1 and layout.marks:
            marks_end = layout.marks_offset + layout.marks * itemsize
            used.append((layout.marks_offset, marks_end))
        position = 0
        for first, last in [*sorted(used), (buffer.slice_nbytes, buffer.slice_nbytes)]:
            if first > position:
                size = (layout.world_size, (first - position) // itemsize)
                gaps.append(_Strided(index, buffer.dtype, size, (stride, 1), position // itemsize))
            position = max(position, last)
    return _merged(gaps)


def _merged(gaps: Sequence[_Strided]) -> tuple[_Strided, ...]:
    """The same elements in as few gaps as possible: those of the same ranks side by side are one.

    Where most ranks hold nothing, as of small tensors over many, that is one gap, not hundreds.
    """
    merged: list[_Strided] = []
    for gap in sorted(gaps, key=lambda gap: (gap.buffer, gap.size[0], gap.offset)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.buffer, last.size[0]) == (gap.buffer, gap.size[0])
            and last.offset + last.size[1] == gap.offset
            and gap.offset % gap.stride[0]  # not in the slices of the next ranks
        ):
            merged[-1] = replace(last, size=(last.size[0], last.size[1] + gap.size[1]))
        else:
            merged.append(gap)
    return tuple(merged)


def _ragged(
    spec: TensorSpec, slot: Slot, world_size: int, chunk: int
) -> list[tuple[int, int, int, int]]:
    """Parts of one tensor's slot that no shard fills: (first rank, ranks, start byte, end byte)."""
    tail = slot.pieces[-1]
    filled = math.prod(tail.shard_shape) * spec.dtype.itemsize
    after = tail.first_rank + tail.ranks
    parts = []
    if filled < chunk:
        parts.append((tail.first_rank, tail.ranks, filled, chunk))
    if after < world_size:
        parts.append((after, world_size - after, 0, chunk))
    return parts


def _as_buffers(
    buffers: torch.Tensor | tuple[torch.Tensor, ...], layout: Layout, slices: int
) -> tuple[torch.Tensor, ...]:
    """``buffers`` as a tuple, each checked to hold ``slices`` rank slices of the layout."""
    given = (buffers,) if isinstance(buffers, torch.Tensor) else tuple(buffers)
    if len(given) != len(layout.buffers):
        raise ValueError(
            f"got {len(given)} buffers; the layout has {len(layout.buffers)}. Pass one per "
            "layout.buffers."
        )
    for buffer, spec in zip(given, layout.buffers, strict=True):
        wanted = spec.slice_numel * slices
        if buffer.dim() != 1 or buffer.numel() != wanted or buffer.dtype is not spec.dtype:
            raise ValueError(
                f"got a buffer of shape {tuple(buffer.shape)} and {buffer.dtype}; the layout needs "
                f"shape ({wanted},) and {spec.dtype}. Allocate it from layout.buffers."
            )
        if not buffer.is_contiguous():
            raise ValueError(
                f"got a buffer with stride {buffer.stride()}; it must be contiguous. Pass a flat "
                "buffer."
            )
    return given


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as another tensor, which autograd does not take for a view of the first."""
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def shard_views(
    slice_buffer: torch.Tensor | tuple[torch.Tensor, ...], layout: Layout, rank: int
) -> list[torch.Tensor]:
    """Per tensor, the view of ``rank``'s own shard in its slice; empty for an empty shard.

    Args:
        slice_buffer: ``rank``'s slice, ``[slice_numel]`` (a tuple of them if the layout has several
            buffers).
        layout: where things lie.
        rank: whose slice it is.

    Raises:
        ValueError: if a buffer does not have the layout's dtype and size.
    """
    return _Typed(_as_buffers(slice_buffer, layout, 1)).views(_shard_plan(layout, rank))


def shards_of(output: torch.Tensor, layout: Layout, rank: int) -> list[torch.Tensor]:
    """``shard_views`` of what a reduction gave: one buffer, of the dtype of all tensors."""
    start = int(output.storage_offset())
    return [
        output.as_strided(plan.size, plan.stride, start + plan.offset)
        for plan in _shard_plan(layout, rank)
    ]


def piece_views(
    buffer: torch.Tensor | tuple[torch.Tensor, ...], layout: Layout, ranks: range | None = None
) -> list[list[torch.Tensor]]:
    """Per tensor, the view ``[piece.ranks, *piece.shard_shape]`` of each of its pieces.

    Args:
        buffer: the slices of all ranks (a tuple, if the layout has several buffers).
        layout: where things lie.
        ranks: consecutive ranks, if the buffer has the slices of those only.

    Raises:
        ValueError: if a buffer does not have the layout's dtype and ``slice_numel`` elements for
            each rank.
    """
    ranks = range(layout.world_size) if ranks is None else ranks
    typed = _Typed(_as_buffers(buffer, layout, len(ranks)))
    return [[typed.view(plan) for plan in plans] for plans in _piece_plan(layout, ranks)]


def full_views(full: torch.Tensor, spec: TensorSpec, slot: Slot) -> list[torch.Tensor]:
    """The views of a full tensor that match ``piece_views``, for any dim and stride.

    Each is ``full.narrow(dim, start, ranks * rows).unflatten(dim, (ranks, rows)).movedim(dim, 0)``.

    Args:
        full: the full tensor, of ``spec.shape``, or flat with ``spec.numel`` contiguous elements.
        spec: the tensor's spec.
        slot: its slot in the layout.
    """
    return _views_of(full, spec, slot.pieces)


def full_views_for(
    full: torch.Tensor, layout: Layout, index: int, ranks: range
) -> list[torch.Tensor]:
    """As ``full_views`` of tensor ``index``, for consecutive ``ranks`` only."""
    return _views_of(full, layout.specs[index], _pieces_of(layout, ranks)[index])


def _views_of(
    full: torch.Tensor, spec: TensorSpec, pieces: tuple[Piece, ...]
) -> list[torch.Tensor]:
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


def gap_views(
    buffer: torch.Tensor | tuple[torch.Tensor, ...], layout: Layout, ranks: range | None = None
) -> list[torch.Tensor]:
    """Views ``[ranks, n]`` of all that no shard and no mark fills: a reduction must zero it.

    Args:
        buffer: as for ``piece_views``.
        layout: where things lie.
        ranks: as for ``piece_views``.

    Raises:
        ValueError: as ``piece_views``.
    """
    ranks = range(layout.world_size) if ranks is None else ranks
    typed = _Typed(_as_buffers(buffer, layout, len(ranks)))
    return [typed.view(plan) for plan in _gap_plan(layout, ranks)]


def marks_view(buffer: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The marks of the last buffer, ``[slices, marks]``: one row per rank slice that it holds."""
    spec = layout.buffers[-1]
    first = layout.marks_offset // spec.dtype.itemsize
    return buffer.view(-1, spec.slice_numel).narrow(1, first, layout.marks)


def own_marks(output: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The marks in one rank's slice of the last buffer, ``[marks]``."""
    first = layout.marks_offset // output.dtype.itemsize
    return output.narrow(0, first, layout.marks)


def tensors_view(buffer: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The part of the last buffer before the marks, ``[slices, n]``: all its tensors."""
    spec = layout.buffers[-1]
    numel = layout.marks_offset // spec.dtype.itemsize
    return buffer.view(-1, spec.slice_numel).narrow(1, 0, numel)
