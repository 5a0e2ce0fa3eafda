"""Pieces: parts of a parameter, each of which is a part of one tensor in a file.

Owns the way between both, in either direction: the part of a file that a shard needs, and the part
of a shard that a part of the file needs. A rule of renaming, fusing, splitting or transposing makes
pieces; nothing that reads or writes knows of rules. This module reads no file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fullshard.checkpoint.boxes import Box

__all__ = ["Piece", "in_stack", "same"]


@dataclass(frozen=True)
class Piece:
    """A box of a parameter and the box of a file's tensor that has its values.

    Attributes:
        file: the name of the tensor in the files.
        shape: of that whole tensor.
        in_file: the box in it.
        in_param: the box in the parameter.
        dims: for each dim of the file's tensor, the matching dim of the parameter; None: the piece
            has one index there. The piece has one index, too, in dims of the parameter that are not
            named.
    """

    file: str
    shape: tuple[int, ...]
    in_file: Box
    in_param: Box
    dims: tuple[int | None, ...]

    def of_shard(self, box: Box) -> Piece | None:
        """Return the piece's part inside ``box`` of the parameter; None if it is empty."""
        found = self.in_param.overlap(box)
        if found.numel == 0:
            return None
        start, size = list(self.in_file.start), list(self.in_file.size)
        for dim, param_dim in enumerate(self.dims):
            if param_dim is not None:
                start[dim] += found.start[param_dim] - self.in_param.start[param_dim]
                size[dim] = found.size[param_dim]
        return replace(self, in_file=Box(tuple(start), tuple(size)), in_param=found)

    def of_file(self, box: Box) -> Piece | None:
        """Return the piece's part inside ``box`` of the file's tensor; None if it is empty."""
        found = self.in_file.overlap(box)
        if found.numel == 0:
            return None
        start, size = list(self.in_param.start), list(self.in_param.size)
        for dim, param_dim in enumerate(self.dims):
            if param_dim is not None:
                start[param_dim] += found.start[dim] - self.in_file.start[dim]
                size[param_dim] = found.size[dim]
        return replace(self, in_file=found, in_param=Box(tuple(start), tuple(size)))

    def view(self, shard: torch.Tensor, box: Box) -> torch.Tensor:
        """Return the piece of ``shard`` in the form of the file: a view, of ``in_file``'s shape.

        Args:
            shard: of the parameter.
            box: the position of the shard in the parameter; it holds all of the piece.
        """
        part = self.in_param.of(shard, box)
        order = [dim for dim in self.dims if dim is not None]
        rest = [dim for dim in range(part.ndim) if dim not in order]
        part = part.permute(*rest, *order)[(0,) * len(rest)] if part.ndim else part
        for dim, param_dim in enumerate(self.dims):
            if param_dim is None:
                part = part.unsqueeze(dim)
        return part


def same(name: str, shape: torch.Size | tuple[int, ...]) -> Piece:
    """Return the piece of a parameter that is equal to the file's tensor ``name``."""
    whole = Box.whole(shape)
    return Piece(name, tuple(shape), whole, whole, tuple(range(len(shape))))


def in_stack(piece: Piece, index: int) -> Piece:
    """Return ``piece`` of entry ``index`` of a new first dim of the parameter."""
    box = Box((index, *piece.in_param.start), (1, *piece.in_param.size))
    dims = tuple(None if dim is None else dim + 1 for dim in piece.dims)
    return Piece(piece.file, piece.shape, piece.in_file, box, dims)
