"""Exchanges: matrices travel from the ranks that hold their parts to their owners, and back.

Owns which part of a batch of matrices goes where, each once: with W ranks, (W-1)/W of all elements
to the owners, and as many back to each replica. The part that a rank keeps for itself is copied,
not sent. ``exchange`` moves values. Knows matrices and boxes; refuses to know what an owner
computes.

[Note: who sends] The ranks of a replicating axis hold copies of a part, and one rank sends the
part: the rank with the owner's coordinates on these axes. The result goes to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fullshard.checkpoint.spi import Box
from fullshard.comm.spi import foreach_copy
from fullshard.optim.owners.exchange import ValueExchange
from fullshard.optim.owners.ranks import Ranks

__all__ = ["Arrived", "Batch", "Matrix", "Travelling", "Wait"]

_NAME = "matrices of an optimizer"

Wait = Callable[[], None]
"""Returns once all that is on its way to this rank has come, and was taken."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix that its owner computes.

    Attributes:
        param: the number of its parameter, in the order that the caller knows.
        number: its own among the matrices of that parameter.
        box: what of the parameter it is.
        owner: which of the ranks computes it.
        held: what each rank has of the parameter.
        replicated: the mesh axes whose ranks hold copies.
    """

    param: int
    number: int
    box: Box
    owner: int
    held: tuple[Box, ...]
    replicated: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a matrix, by its place in the batch, that one rank holds."""

    matrix: int
    box: Box


_Values = list[tuple[_Piece, torch.Tensor]]


class _Route:
    """Pieces that travel in one direction, step after step."""

    def __init__(
        self, pieces: Mapping[tuple[int, int], list[_Piece]], ranks: Ranks, dtype: torch.dtype
    ) -> None:
        """Plan it; ``pieces``: all, by the ranks that give and take them."""
        own = ranks.index
        others = {pair: each for pair, each in pieces.items() if pair[0] != pair[1]}
        self._kept = pieces.get((own, own), [])
        self._given = {taker: each for (giver, taker), each in others.items() if giver == own}
        self._taken = {giver: each for (giver, taker), each in others.items() if taker == own}
        self._exchange: ValueExchange | None = None
        if others:
            assert ranks.process_group is not None and ranks.device is not None, "they are several"
            numels = {pair: sum(map(_numel, each)) for pair, each in others.items()}
            self._exchange = ValueExchange(numels, dtype, ranks.device, ranks.process_group, _NAME)

    def launch(
        self, view: Callable[[_Piece], torch.Tensor], take: Callable[[_Values], None]
    ) -> Wait:
        """Send what goes to others.

        Args:
            view: returns the values of a piece, in any dtype.
            take: gets the pieces that came and those that stay, at the latest when they are waited
                for. Their memory is others' afterwards.
        """
        kept = [(piece, view(piece)) for piece in self._kept]

        def write(memory: Mapping[int, torch.Tensor]) -> None:
            given = _split(self._given, memory)
            foreach_copy([there for _, there in given], [view(piece) for piece, _ in given])

        def read(memory: Mapping[int, torch.Tensor]) -> None:
            take([*kept, *_split(self._taken, memory)])

        if self._exchange is None:
            return lambda: read({})
        return self._exchange.launch(write, read).wait


def _numel(piece: _Piece) -> int:
    return piece.box.numel


def _split(pieces: Mapping[int, list[_Piece]], memory: Mapping[int, torch.Tensor]) -> _Values:
    """Return pieces, by rank, each with its part of that rank's memory."""
    found: _Values = []
    for rank, flat in memory.items():
        parts = flat.split(list(map(_numel, pieces[rank])))
        for piece, part in zip(pieces[rank], parts, strict=True):
            found.append((piece, part.view(piece.box.size)))
    return found


class Batch:
    """Matrices that travel together.

    Attributes:
        matrices: all of them.
        owned: the places of those that this rank owns.
        ranks: who exchange.
    """

    def __init__(self, matrices: Sequence[Matrix], ranks: Ranks, dtype: torch.dtype) -> None:
        """Plan both ways; a collective call, the first time for these ranks.

        Args:
            matrices: equal, and in equal order, on all of ``ranks``.
            ranks: who exchange.
            dtype: in which matrices travel and arrive.
        """
        self.matrices = tuple(matrices)
        self.owned = [at for at, each in enumerate(matrices) if each.owner == ranks.index]
        self.ranks = ranks
        self._dtype = dtype
        self._there = _Route(self._pieces_there(), ranks, dtype)
        self._back = _Route(self._pieces_back(), ranks, dtype)

    def _pieces_there(self) -> dict[tuple[int, int], list[_Piece]]:
        """Return what each holder gives to each owner; see [Note: who sends]."""
        places = self.ranks.coordinates
        found: dict[tuple[int, int], list[_Piece]] = {}
        for owner, holder, piece in self._pieces():
            replicated = self.matrices[piece.matrix].replicated
            if all(places[owner][axis] == places[holder][axis] for axis in replicated):
                found.setdefault((holder, owner), []).append(piece)
        return found

    def _pieces_back(self) -> dict[tuple[int, int], list[_Piece]]:
        """Return what each owner gives to each holder."""
        found: dict[tuple[int, int], list[_Piece]] = {}
        for owner, holder, piece in self._pieces():
            found.setdefault((owner, holder), []).append(piece)
        return found

    def _pieces(self) -> Iterator[tuple[int, int, _Piece]]:
        """Yield owner, holder and piece, in one order on all ranks."""
        for at, each in enumerate(self.matrices):
            for holder, held in enumerate(each.held):
                box = each.box.overlap(held)
                if box.numel:
                    yield each.owner, holder, _Piece(at, box)

    def to_owners(self, parts: Mapping[int, torch.Tensor]) -> Travelling:
        """Return all matrices, on their way to their owners.

        Args:
            parts: this rank's part of each parameter, in any dtype.
        """
        device = self.ranks.device or next(iter(parts.values())).device
        whole = {
            at: torch.empty(self.matrices[at].box.size, dtype=self._dtype, device=device)
            for at in self.owned
        }

        def view(piece: _Piece) -> torch.Tensor:
            matrix = self.matrices[piece.matrix]
            return piece.box.of(parts[matrix.param], matrix.held[self.ranks.index])

        def take(came: _Values) -> None:
            for piece, values in came:
                piece.box.of(whole[piece.matrix], self.matrices[piece.matrix].box).copy_(values)

        return Travelling(whole, self._there.launch(view, take))

    def to_holders(
        self, results: Mapping[int, torch.Tensor], take: Callable[[Sequence[Arrived]], None]
    ) -> Wait:
        """Send the results of all owners to the ranks that hold their parts.

        Args:
            results: ``[rows, columns]`` for each matrix that this rank owns.
            take: gets each part of a result that this rank holds, at the latest when they are
                waited for, and keeps none.
        """

        def view(piece: _Piece) -> torch.Tensor:
            box = self.matrices[piece.matrix].box
            return piece.box.of(results[piece.matrix].view(box.size), box)

        def arrive(came: _Values) -> None:
            own, matrices = self.ranks.index, self.matrices
            take(
                [
                    Arrived(matrices[piece.matrix], piece.box, matrices[piece.matrix].held[own], at)
                    for piece, at in came
                ]
            )

        return self._back.launch(view, arrive)


@dataclass(frozen=True, slots=True)
class Travelling:
    """Matrices on their way to their owners."""

    whole: Mapping[int, torch.Tensor]
    arrive: Wait

    def wait(self) -> dict[int, torch.Tensor]:
        """Return the matrices that this rank owns, ``[rows, columns]``, by their place."""
        self.arrive()
        return {at: each.view(each.shape[-2:]) for at, each in self.whole.items()}


@dataclass(frozen=True, slots=True)
class Arrived:
    """A part of an owner's result that this rank holds.

    Attributes:
        matrix: of which it is a part.
        box: what of the parameter it is.
        held: what this rank has of the parameter.
        values: the result.
    """

    matrix: Matrix
    box: Box
    held: Box
    values: torch.Tensor

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Return the same part of ``data``, this rank's shard."""
        return self.box.of(data, self.held)
