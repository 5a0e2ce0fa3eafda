"""The gradients that one rank gives to a reduction, which are sent without packing.

The main class is ``Contribution``: it writes this rank's part for other ranks, cast and scaled, and
adds its own part without a copy. A ``Span`` is some numbers of every rank's slice, for transports
that reduce span after span where whole slices would take much memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.buffers.packing import pack_gradients
from fullshard.comm.layouts import views
from fullshard.comm.layouts.layout import Layout, Piece
from fullshard.comm.layouts.scaling import ReduceOp, ReduceScaling
from fullshard.comm.runtime.compat import foreach_copy, without_grad
from fullshard.comm.transports.rank_order import check_reduction, reduce_checked

__all__ = ["Contribution", "PartsReducer", "Rows", "Span"]

_IN_PLACE = 1 << 15  # parts of at least this many bytes are added in place; smaller ones are packed


class PartsReducer(Protocol):
    """Reduces gradients that are not packed."""

    def reduce_parts(
        self,
        allocate: Callable[[], torch.Tensor],
        contribution: Contribution,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
    ) -> dist.Work | None:
        """In flight: this rank's slice of the result, ``[slice_numel]``, in what ``allocate`` gave.

        ``allocate`` is called once, when every rank's part is there: a reduction that is under way
        needs no memory for its result. None, on all ranks, where it cannot: then nothing has
        happened.
        """


@dataclass(frozen=True, slots=True)
class Rows:
    """Where this rank has the numbers that consecutive ranks get at one place of their slices.

    Attributes:
        first: the first of these ranks.
        start: the place: numbers from the start of a slice.
        values: ``[ranks, n]``, in any dtype.
    """

    first: int
    start: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The input of one rank to one span of a reduction, or to the whole of it.

    Attributes:
        rows: what it gives to the whole reduction; zeros elsewhere.
        dtype: the dtype in which it is reduced.
        rank: this rank.
        start: where the span begins, in numbers from the start of a slice.
        numel: the length of the span, in numbers of one slice.
    """

    rows: Sequence[Rows]
    dtype: torch.dtype
    rank: int
    start: int = 0
    numel: int

    def span(self, start: int, numel: int) -> Span:
        """Return the span of ``numel`` numbers from ``start`` on."""
        return replace(self, start=start, numel=numel)

    def write(self, buffer: torch.Tensor, ranks: range) -> None:
        """Fill ``buffer``, ``[len(ranks) * numel]``, with what this rank gives to ``ranks``."""
        stacked, end = buffer.view(len(ranks), -1), self.start + self.numel
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for each in self.rows:
            count, length = each.values.shape
            first, last = max(each.first, ranks.start), min(each.first + count, ranks.stop)
            low, high = max(each.start, self.start), min(each.start + length, end)
            if first < last and low < high:
                target = stacked[first - ranks.start : last - ranks.start]
                source = each.values[first - each.first : last - each.first]
                targets.append(target[:, low - self.start : high - self.start])
                sources.append(source[:, low - each.start : high - each.start])
        if sum(target.numel() for target in targets) < buffer.numel():
            buffer.zero_()
        foreach_copy(targets, sources)

    @without_grad
    def reduce(
        self, others: Sequence[torch.Tensor | None], output: torch.Tensor, op: ReduceOp
    ) -> None:
        """Reduce this rank's numbers and the others' into ``output``, in rank order.

        Args:
            others: by rank, its numbers for this one, ``[numel]``; None for this one itself.
            output: the span of this rank's result, ``[numel]``.
            op: the reduction.
        """
        name, own = check_reduction(op, self.dtype), self._own()
        if own is None:
            self.write(output, range(self.rank, self.rank + 1))
            own = output
        reduce_checked([own if other is None else other for other in others], output, name)

    def _own(self) -> torch.Tensor | None:
        """Return this rank's own numbers, if they are together and need no cast."""
        for each in self.rows:
            count, length = each.values.shape
            first, start = self.rank - each.first, self.start - each.start
            within = 0 <= first < count and 0 <= start <= length - self.numel
            if within and each.values.dtype is self.dtype:
                return each.values[first].narrow(0, start, self.numel)
        return None


class Contribution:
    """One rank's gradients, for a reduction in one layout of one buffer.

    Attributes:
        layout: the layout of a slice.
        rank: whose they are.
        dtype: in which they are reduced.
        numel: how many numbers one rank's slice is.
    """

    def __init__(
        self,
        gradients: Sequence[torch.Tensor | None],
        layout: Layout,
        rank: int,
        scaling: ReduceScaling,
    ) -> None:
        """Take checked gradients, which stay as they are until the reduction has ended."""
        self.layout = layout
        self.rank = rank
        self.dtype = layout.buffer.dtype
        self.numel = layout.buffer.slice_numel
        self._rows: list[Rows] = []  # for spans
        self._gradients = list(gradients)
        self._scaling = scaling
        if scaling.scales_before:  # once, though they are written in parts
            self._gradients = [None if each is None else each * scaling.pre for each in gradients]
            self._scaling = replace(scaling, pre=1.0)

    def write(
        self, buffer: torch.Tensor, ranks: range, left_out: Collection[int] = frozenset()
    ) -> None:
        """Fill ``buffer``, ``[len(ranks) * slice_numel]``, with the parts for these ranks.

        But not with those of the gradients whose numbers are ``left_out``.
        """
        packed = Buffer(buffer, self.layout, self.rank, ranks=ranks)
        pack_gradients(packed, self._gradients, self._scaling, left_out)

    @without_grad
    def reduce(
        self, others: Sequence[torch.Tensor | None], output: torch.Tensor, op: ReduceOp
    ) -> None:
        """Reduce this rank's part and the others' into ``output``, in rank order.

        Args:
            others: by rank, its slice for this one, ``[slice_numel]``; None for this one itself.
            output: this rank's slice of the result, ``[slice_numel]``.
            op: the reduction.
        """
        name, in_place = check_reduction(op, self.dtype), self._added_in_place()
        self.write(output, range(self.rank, self.rank + 1), in_place)
        sizes, found = zip(*_stretches(in_place.values(), self.numel), strict=True)
        targets = output.split_with_sizes(sizes)
        own = [part if here is None else here for part, here in zip(targets, found, strict=True)]
        cut = [own if other is None else other.split_with_sizes(sizes) for other in others]
        for target, *parts in zip(targets, *cut, strict=True):
            reduce_checked(parts, target, name)

    def span(self, start: int, numel: int) -> Span:
        """Return what this rank gives to the numbers from ``start`` on of every slice."""
        if not self._rows:
            self._rows = list(self._found_rows())
        rank, dtype = self.rank, self.dtype
        return Span(rows=self._rows, dtype=dtype, rank=rank, start=start, numel=numel)

    def _found_rows(self) -> Iterator[Rows]:
        """Yield the flat parts of each gradient: views, or copies where a view is impossible."""
        layout, itemsize = self.layout, self.dtype.itemsize
        for gradient, spec, extent in zip(
            self._gradients, layout.specs, layout.extents, strict=True
        ):
            if gradient is not None:
                parts = views.full_views(gradient, spec, extent.pieces)
                for piece, part in zip(extent.pieces, parts, strict=True):
                    flat = part.reshape(piece.ranks, -1)
                    yield Rows(piece.first_rank, extent.offset // itemsize, flat)
        if layout.mask_numel:
            used = [0.0 if each is None else self._scaling.used for each in self._gradients]
            mask = torch.tensor(used, dtype=self.dtype).expand(layout.world_size, -1)
            yield Rows(0, layout.mask_offset // itemsize, mask)

    def _added_in_place(self) -> dict[int, tuple[int, torch.Tensor]]:
        """Return start in the slice and part of each gradient that is added in place, by its index.

        The others are packed into the result first.
        """
        found = {}
        for index, start, pieces in _large(self.layout, self.rank):
            gradient = self._gradients[index]
            if gradient is not None and gradient.dtype is self.dtype:
                (own,) = views.full_views(gradient, self.layout.specs[index], pieces)
                if own.is_contiguous():
                    found[index] = start, own.view(-1)
        return found


@functools.lru_cache(maxsize=4096)
def _large(layout: Layout, rank: int) -> list[tuple[int, int, Sequence[Piece]]]:
    """Of each large part of a rank its number, where it begins in the slice, and its one piece."""
    held = views.pieces_within(layout, range(rank, rank + 1))
    itemsize = layout.buffer.dtype.itemsize
    return [
        (index, extent.offset // itemsize, pieces)
        for index, (extent, pieces) in enumerate(zip(layout.extents, held, strict=True))
        if pieces and math.prod(pieces[0].shard_shape) * itemsize >= _IN_PLACE
    ]


def _stretches(
    parts: Iterable[tuple[int, torch.Tensor]], numel: int
) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Yield the stretches of a slice: length, and the part if it is elsewhere."""
    reached = 0
    for start, part in sorted(parts, key=lambda each: each[0]):
        if start > reached:
            yield start - reached, None
        reached = start + part.numel()
        yield part.numel(), part
    if numel > reached:
        yield numel - reached, None
