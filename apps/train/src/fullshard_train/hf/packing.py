"""Which documents share a row, and the tensors of such rows.

Owns packing by best fit: documents from the longest to the shortest, each into the fullest row that
has room for it ("best-fit decreasing"; Johnson 1973, https://dspace.mit.edu/handle/1721.1/57819).
Documents are never cut, so few tokens of a row are padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fullshard_train.task import IGNORED, Batch

__all__ = ["Documents", "Rows", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Documents as tokens, one after another.

    `tokens` is int32, `[all tokens]`; `learned` bool, `[all tokens]`: which are predicted, but for
    the first of a document; `lengths` int64, `[documents]`, each at least 2.
    """

    tokens: torch.Tensor
    learned: torch.Tensor
    lengths: torch.Tensor

    def part(self, chosen: torch.Tensor) -> Documents:
        """Keep the documents that `chosen`, bool `[documents]`, selects."""
        places = chosen.repeat_interleave(self.lengths)
        return Documents(
            tokens=self.tokens[places],
            learned=self.learned[places],
            lengths=self.lengths[chosen],
        )


def pack(lengths: Sequence[int], block: int, *, apart: bool) -> list[list[int]]:
    """The rows of at most `block` tokens that documents of these lengths fill, as their numbers.

    Args:
        lengths: of the documents, each at most `block`.
        block: the tokens of a row.
        apart: give each document a row of its own.
    """
    if apart:
        return [[number] for number in range(len(lengths))]
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        place = bisect_left(open_rows, (lengths[number], 0))
        if place == len(open_rows):
            room, row = block, len(rows)
            rows.append([])
        else:
            room, row = open_rows.pop(place)
        rows[row].append(number)
        if room - lengths[number] > 1:  # a document has two tokens or more
            insort(open_rows, (room - lengths[number], row))
    return rows


class Rows:
    """Packed documents as rows of one length.

    Args:
        documents: what is packed.
        members: of each row the numbers of its documents, as `pack` gives them.
        block: the tokens of a row.
        padding: the token of places that no document fills.
        restart: positions start from zero in each document; else they count through the row.
    """

    def __init__(
        self,
        documents: Documents,
        members: Sequence[Sequence[int]],
        *,
        block: int,
        padding: int,
        restart: bool,
    ) -> None:
        self.documents = documents
        self.members = members
        self.block = block
        self.padding = padding
        self.restart = restart
        self._ends = documents.lengths.cumsum(0).tolist()
        self._lengths: list[int] = documents.lengths.tolist()
        # No token precedes a document's first token, so the first token is never predicted.
        predicted = documents.learned.clone()
        predicted[documents.lengths.cumsum(0) - documents.lengths] = False
        before = [0, *predicted.cumsum(0)[documents.lengths.cumsum(0) - 1].tolist()]
        self._counted = [sum(before[each + 1] - before[each] for each in row) for row in members]

    def __len__(self) -> int:
        return len(self.members)

    def counted(self, rows: Sequence[int]) -> int:
        """How many predictions count in these rows."""
        return sum(self._counted[row] for row in rows)

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows: `inputs` is `[rows, block, 2]`, tokens and positions; `targets` the next.

        The last token of a document predicts nothing: its target is `IGNORED`, like the targets of
            padding and of tokens before an unlearned token. Tokens after a row's last document
            count as one more document.
        """
        made = [self._row(self.members[row]) for row in rows]
        inputs = torch.stack([row for row, _ in made])
        return Batch(inputs=inputs, targets=torch.stack([targets for _, targets in made]))

    def _row(self, members: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.full((self.block, 2), self.padding, dtype=torch.int64)
        inputs[:, 1] = torch.arange(self.block)
        targets = torch.full((self.block,), IGNORED, dtype=torch.int64)
        begin = 0
        for member in members:
            length, last = self._lengths[member], self._ends[member]
            text = self.documents.tokens[last - length : last]
            inputs[begin : begin + length, 0] = text
            learned = self.documents.learned[last - length + 1 : last]
            targets[begin : begin + length - 1] = text[1:].where(learned, IGNORED)
            self._count_from(inputs, begin)
            begin += length
        self._count_from(inputs, begin)
        return inputs, targets

    def _count_from(self, inputs: torch.Tensor, begin: int) -> None:
        # With one document in each row, padding is behind all that counts: positions go on, and
        # models take the fast path of plain causal attention.
        if self.restart:
            inputs[begin:, 1] = torch.arange(self.block - begin)
