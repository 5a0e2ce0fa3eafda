"""Spans of a reduction: a few numbers of every rank's slice at a time.

The main class is ``Span``. A transport reduces span after span where whole slices would take much
memory. ``Contribution`` knows where the gradients are; ``rank_order`` adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime import compat
from fullshard.comm.transports.rank_order import check_reduction, reduce_checked

__all__ = ["Rows", "Span"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Where this rank has the numbers that consecutive ranks get at one place of their slices.

    Attributes:
        first: the first of these ranks.
        start: the place: numbers from the start of a slice.
        values: ``[ranks, n]``, in any floating-point dtype.
    """

    first: int
    start: int
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The input of one rank to one span of a reduction.

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
    start: int
    numel: int

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
        compat.foreach_copy(targets, sources)

    @compat.without_grad
    def reduce(
        self, others: Sequence[torch.Tensor | None], output: torch.Tensor, op: ReduceOp
    ) -> None:
        """Reduce this rank's numbers and the others' into ``output``, in rank order.

        Args:
            others: by rank, its numbers for this one, ``[numel]``; None for this one itself.
            output: the span of this rank's result, ``[numel]``.
            op: the reduction.
        """
        name = check_reduction(op, self.dtype)
        self.write(output, range(self.rank, self.rank + 1))
        parts = [output if other is None else other for other in others]
        reduce_checked(parts, output, name)
