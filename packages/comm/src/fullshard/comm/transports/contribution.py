"""What one rank gives to a reduction, as its gradients lie: nothing is packed before it is sent.

Owns: writing this rank's part for any consecutive ranks into a buffer, once, cast and scaled on the
way, and adding its own part where it lies. It is for transports that ask for parts (see
``reduce_parts`` of ``SharedMemoryTransport``). Refuses: moving anything, and knowing who reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import Buffer
from fullshard.comm.buffers.packing import write_gradients
from fullshard.comm.layouts import views
from fullshard.comm.layouts.layout import Layout
from fullshard.comm.layouts.scaling import ReduceOp, ReduceScaling
from fullshard.comm.transports.rank_order import reduce_in_rank_order

__all__ = ["Contribution", "PartsReducer"]

_IN_PLACE = 1 << 15  # bytes from which a part is added where it lies; smaller ones are packed


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


class Contribution:
    """One rank's gradients, for a reduction in one layout of one buffer.

    Attributes:
        layout: where everything lies in a slice.
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
        """Takes checked gradients, which stay as they are until the reduction has ended."""
        self.layout = layout
        self.rank = rank
        self.dtype = layout.buffer.dtype
        self.numel = layout.buffer.slice_numel
        self._used = scaling.used
        # Before the cast, in which a value beyond the reduce dtype's range would overflow.
        self._gradients = [
            each if each is None or not scaling.scales_before else each * scaling.pre
            for each in gradients
        ]

    def write(
        self, buffer: torch.Tensor, ranks: range, left_out: Collection[int] = frozenset()
    ) -> None:
        """Fill ``buffer``, ``[len(ranks) * slice_numel]``, with the parts for these ranks.

        But not with those of the gradients whose numbers are ``left_out``.
        """
        packed = Buffer(buffer, self.layout, self.rank, ranks=ranks)
        write_gradients(packed, self._gradients, self._used, left_out)

    def reduce(
        self, others: Sequence[torch.Tensor | None], output: torch.Tensor, op: ReduceOp
    ) -> None:
        """Reduce this rank's part and the others' into ``output``, in rank order.

        Args:
            others: by rank, its slice for this one, ``[slice_numel]``; None for this one itself.
            output: this rank's slice of the result, ``[slice_numel]``.
            op: the reduction.
        """
        in_place = self._added_in_place()
        self.write(output, range(self.rank, self.rank + 1), in_place)
        for start, end, own in _stretches(in_place.values(), self.numel):
            target = output.narrow(0, start, end - start)
            parts = [
                (target if own is None else own)
                if other is None
                else other.narrow(0, start, end - start)
                for other in others
            ]
            reduce_in_rank_order(parts, target, op)

    def _added_in_place(self) -> dict[int, tuple[int, torch.Tensor]]:
        """Per gradient that is added where it lies, where its part begins in the slice; the part.

        The others are packed into the result first.
        """
        found = {}
        held = views.pieces_within(self.layout, range(self.rank, self.rank + 1))
        for index, gradient in enumerate(self._gradients):
            if gradient is None or gradient.dtype is not self.dtype:
                continue
            own = views.full_views(gradient, self.layout.specs[index], held[index])
            if own and own[0].nbytes >= _IN_PLACE and own[0].is_contiguous():
                start = self.layout.extents[index].offset // self.dtype.itemsize
                found[index] = start, own[0].view(-1)
        return found


def _stretches(
    parts: Iterable[tuple[int, torch.Tensor]], numel: int
) -> Iterator[tuple[int, int, torch.Tensor | None]]:
    """All of a slice in stretches: start, end, and the part that lies elsewhere, if it does."""
    reached = 0
    for start, part in sorted(parts, key=lambda each: each[0]):
        if start > reached:
            yield reached, start, None
        reached = start + part.numel()
        yield start, reached, part
    if numel > reached:
        yield reached, numel, None
