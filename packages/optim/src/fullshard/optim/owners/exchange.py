"""Exchanges: matrices travel from the ranks that hold their parts to their owners, and back.

Owns the two all-to-alls of a batch, which move each part once: with W ranks, (W-1)/W of all
elements to the owners, and as many back to each replica. What a rank keeps for itself is copied,
not sent. Knows matrices and boxes; refuses to know what an owner computes.

[Note: who sends] Ranks that hold copies of a part, along axes that replicate, need not all send it:
those do that are where the owner is on these axes. The result goes to all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.checkpoint.boxes import Box
from fullshard.comm import EventKind, check_collective
from fullshard.comm.runtime.compat import end_to_end
from fullshard.comm.runtime.observer import emit
from fullshard.optim.owners.ranks import Ranks

__all__ = ["Arrived", "Batch", "Matrix", "Returning", "Travelling"]

_NAME = "matrices of an optimizer"


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix that its owner computes.

    Attributes:
        param: the number of its parameter, in the order that the caller knows.
        number: its own among the matrices of that parameter.
        box: what of the parameter it is.
        owner: which of the ranks computes it.
        held: what each rank has of the parameter.
        replicated: the axes of the mesh along which ranks have copies.
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


_Kept = list[tuple[_Piece, torch.Tensor]]


class Batch:
    """Matrices that travel together.

    Attributes:
        matrices: all of them.
        owned: the places of those that this rank owns.
        ranks: who exchange.
        dtype: in which they travel.
    """

    def __init__(self, matrices: Sequence[Matrix], ranks: Ranks, dtype: torch.dtype) -> None:
        """Plans both ways.

        Args:
            matrices: the same in the same order on all of ``ranks``.
            ranks: who exchange.
            dtype: in which matrices travel and arrive.
        """
        self.matrices = tuple(matrices)
        self.owned = [at for at, each in enumerate(matrices) if each.owner == ranks.index]
        self.ranks, self.dtype = ranks, dtype
        own, everyone = ranks.index, range(ranks.size)
        self._given = [self._pieces(to, own, all_copies=False) for to in everyone]
        self._taken = [self._pieces(own, by, all_copies=False) for by in everyone]
        self._returned = [self._pieces(own, to, all_copies=True) for to in everyone]
        self._got_back = [self._pieces(by, own, all_copies=True) for by in everyone]

    def _pieces(self, owner: int, holder: int, *, all_copies: bool) -> list[_Piece]:
        """Returns what ``holder`` has of the matrices of ``owner``; see [Note: who sends]."""
        found, places = [], self.ranks.coordinates
        for at, each in enumerate(self.matrices):
            there = [places[owner][axis] == places[holder][axis] for axis in each.replicated]
            if each.owner == owner and (all_copies or all(there)):
                box = each.box.overlap(each.held[holder])
                if box.numel:
                    found.append(_Piece(at, box))
        return found

    def to_owners(self, parts: Mapping[int, torch.Tensor]) -> Travelling:
        """Returns all matrices, on their way to their owners.

        Args:
            parts: this rank's part of each parameter, in any dtype.
        """

        def view(piece: _Piece) -> torch.Tensor:
            matrix = self.matrices[piece.matrix]
            return piece.box.of(parts[matrix.param], matrix.held[self.ranks.index])

        device = self.ranks.device or next(iter(parts.values())).device
        kept, in_flight = self._launch(self._given, self._taken, view)
        return Travelling(self, device, kept, in_flight)

    def to_holders(self, results: Mapping[int, torch.Tensor]) -> Returning:
        """Returns the results of all owners, on their way to the ranks that hold their parts.

        Args:
            results: ``[rows, columns]`` for each matrix that this rank owns.
        """

        def view(piece: _Piece) -> torch.Tensor:
            box = self.matrices[piece.matrix].box
            return piece.box.of(results[piece.matrix].view(box.size), box)

        kept, in_flight = self._launch(self._returned, self._got_back, view)
        return Returning(self, self.ranks.index, kept, in_flight)

    def _launch(
        self,
        outgoing: list[list[_Piece]],
        incoming: list[list[_Piece]],
        view: Callable[[_Piece], torch.Tensor],
    ) -> tuple[_Kept, _InFlight | None]:
        """Sends what goes to others; returns what stays, and what is on its way."""
        ranks, own = self.ranks, self.ranks.index
        kept = [(piece, view(piece)) for piece in outgoing[own]]
        if ranks.process_group is None or ranks.device is None:
            return kept, None
        to, by = (
            [[] if rank == own else pieces for rank, pieces in enumerate(each)]
            for each in (outgoing, incoming)
        )
        flat = [
            view(piece).reshape(-1).to(ranks.device, self.dtype) for each in to for piece in each
        ]
        sent, received = (
            torch.empty(sum(map(_numel, each)), dtype=self.dtype, device=ranks.device)
            for each in (to, by)
        )
        end_to_end(flat, sent)
        nbytes = self.dtype.itemsize * sum(each.box.numel for each in self.matrices)
        check_collective(EventKind.ALL_TO_ALL, _NAME, ranks.process_group, nbytes=nbytes)
        emit(EventKind.ALL_TO_ALL, _NAME, rank=dist.get_rank(), nbytes=sent.nbytes)
        work = dist.all_to_all_single(
            received.view(torch.uint8),  # gloo knows fewer dtypes
            sent.view(torch.uint8),
            [_numel(pieces) * self.dtype.itemsize for pieces in by],
            [_numel(pieces) * self.dtype.itemsize for pieces in to],
            group=ranks.process_group,
            async_op=True,
        )
        assert work is not None, "it is asynchronous"
        return kept, _InFlight(work, sent, received, [piece for each in by for piece in each])


def _numel(pieces: Sequence[_Piece]) -> int:
    return sum(piece.box.numel for piece in pieces)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """An all-to-all of pieces: its handle, its buffers, and what comes, in order."""

    work: dist.Work
    sent: torch.Tensor
    received: torch.Tensor
    pieces: list[_Piece]

    def wait(self) -> Iterator[tuple[_Piece, torch.Tensor]]:
        """Yields each piece that came, with its values."""
        self.work.wait()
        start = 0
        for piece in self.pieces:
            yield piece, self.received.narrow(0, start, piece.box.numel).view(piece.box.size)
            start += piece.box.numel


@dataclass(frozen=True, slots=True)
class Travelling:
    """Matrices on their way to their owners."""

    batch: Batch
    device: torch.device
    kept: _Kept
    in_flight: _InFlight | None

    def wait(self) -> dict[int, torch.Tensor]:
        """Returns the matrices that this rank owns, ``[rows, columns]``, by their place."""
        batch = self.batch
        new = torch.empty(0, dtype=batch.dtype, device=self.device).new_empty
        whole = {at: new(batch.matrices[at].box.size) for at in batch.owned}
        came = () if self.in_flight is None else self.in_flight.wait()
        for piece, part in (*self.kept, *came):
            piece.box.of(whole[piece.matrix], batch.matrices[piece.matrix].box).copy_(part)
        return {at: each.view(each.shape[-2:]) for at, each in whole.items()}


@dataclass(frozen=True, slots=True)
class Returning:
    """Results on their way to the ranks that hold their parts."""

    batch: Batch
    rank: int
    kept: _Kept
    in_flight: _InFlight | None

    def wait(self) -> Iterator[Arrived]:
        """Yields each part of a result that this rank holds."""
        came = () if self.in_flight is None else self.in_flight.wait()
        for piece, values in (*self.kept, *came):
            matrix = self.batch.matrices[piece.matrix]
            yield Arrived(matrix, piece.box, matrix.held[self.rank], values)


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
        """Returns the same part of ``data``, this rank's shard."""
        return self.box.of(data, self.held)
