"""Rules between parameters and the tensors of files: rename, transpose, fuse, split, stack.

Owns one rule, checked where it is built, and its result for one parameter: its pieces. Rules map
the model's names to the files' names, so one list of rules works for loading and saving.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fullshard.checkpoint.boxes import Box
from fullshard.checkpoint.files.headers import WeightsError
from fullshard.checkpoint.rules.pieces import Piece, in_stack, same
from fullshard.checkpoint.rules.templates import fields_of, filled, matched

__all__ = ["Rule", "Shapes"]

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of tensors by name."""


@dataclass(frozen=True)
class Rule:
    """A rule that maps parameters of the model to tensors of files.

    Names are templates: ``{field}`` stands for text without a dot, ``{*field}`` for any text, and
    is the same on both sides. The first rule of a list whose ``model`` matches a name counts.

    - One name on each side renames.
    - Several names in ``file`` are *fused* into one parameter, concatenated in ``dim``.
    - Several names in ``model`` are the parts into which one tensor of the files is *split* in
      ``dim``.
    - A field in ``file`` alone *stacks*: the parameter's first dim counts through it, from 0.
    - A field in ``model`` alone *unstacks*: the first dim of the file's tensor counts through it.
    - ``file=None`` leaves a parameter alone, ``model=None`` a tensor of the files.

    Attributes:
        model: a template, or several, of the model's names.
        file: a template, or several, of the files' names.
        dim: the dim of the parameter in which it is fused or split; it does not count the dim that
            stacks.
        parts: the sizes of what is fused, in proportion: ``(4, 1, 1)`` for q, k, v with four query
            heads to a key head. None: as the files have them; equal where files are made.
        groups: into how many equal groups ``dim`` is cut first; each group has its own parts. In a
            few models the q, k and v of each head are together.
        transpose: two dims of the parameter that are swapped in the files.

    Raises:
        TypeError: if a name is neither text, nor several, nor None.
        ValueError: if both sides have several names, fields do not fit, or a number is wrong.
    """

    model: str | Sequence[str] | None
    file: str | Sequence[str] | None
    dim: int = 0
    parts: Sequence[int] | None = None
    groups: int = 1
    transpose: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Check it."""
        for side in (self.model, self.file):
            several = isinstance(side, Sequence) and all(isinstance(each, str) for each in side)
            if side is not None and not several:
                raise TypeError(f"{self} has a name that is no text; pass a str, several, or None")
        if not self.models and not self.files:
            raise ValueError(f"{self} names nothing; pass model, file or both")
        if len(self.models) > 1 and len(self.files) > 1:
            raise ValueError(f"{self} has several names on both sides; write a rule for each")
        if self.models and self.files:
            self._check_fields()
        if self.parts is not None and len(self.parts) != max(len(self.files), len(self.models)):
            raise ValueError(f"{self} has {len(self.parts)} parts; pass one for each name")
        if self.groups < 1 or any(part < 1 for part in self.parts or ()):
            raise ValueError(f"{self} has parts or groups below 1; pass positive numbers")

    def _check_fields(self) -> None:
        sides = [{fields_of(each) for each in side} for side in (self.models, self.files)]
        if any(len(side) > 1 for side in sides):
            raise ValueError(f"{self}: names of one side must have the same fields")
        (model,), (file,) = sides
        if len(model ^ file) > 1:
            raise ValueError(
                f"{self}: the fields {', '.join(sorted(model ^ file))} are on one side only; one "
                "such field stacks or unstacks, others must be on both sides"
            )

    @property
    def models(self) -> tuple[str, ...]:
        """Return all templates of the model's names."""
        return _several(self.model)

    @property
    def files(self) -> tuple[str, ...]:
        """Return all templates of the files' names."""
        return _several(self.file)

    def fields(self, name: str) -> tuple[int, dict[str, str]] | None:
        """Return which of its templates makes the model's ``name``, and with which fields."""
        for index, template in enumerate(self.models):
            found = matched(template, name)
            if found is not None:
                return index, found
        return None

    def ignores(self, name: str) -> bool:
        """Return whether the rule skips the files' tensor ``name``."""
        return not self.models and any(matched(each, name) is not None for each in self.files)

    def pieces(self, name: str, params: Shapes, stored: Shapes | None) -> list[Piece]:
        """Return the pieces of the parameter ``name``, which it matches; none to leave it alone.

        Args:
            name: the model's.
            params: all of the model's shapes.
            stored: the shapes in the files; None where files are made.

        Raises:
            WeightsError: if shapes do not allow it, or a part of a file's tensor is missing.
        """
        found = self.fields(name)
        assert found is not None, "it matches"
        index, fields = found
        if not self.files:
            return []
        if len(self.models) > 1 or fields_of(self.models[0]) - fields_of(self.files[0]):
            return self._split(index, fields, params)
        return self._fused(name, fields, params[name], stored)

    # -- several tensors of files are one parameter -----------------------------------------------

    def _fused(
        self, name: str, fields: Mapping[str, str], shape: tuple[int, ...], stored: Shapes | None
    ) -> list[Piece]:
        counter = fields_of(self.files[0]) - fields_of(self.models[0])
        if counter and not shape:
            raise WeightsError(f"{name} has no dim to stack along, as {self} says")
        if not counter and len(self.files) == 1 and self.transpose is None:
            return [same(filled(self.files[0], fields), shape)]
        inner = shape[1:] if counter else shape
        found = []
        for each in range(shape[0]) if counter else (None,):
            more = dict.fromkeys(counter, str(each))
            files = [filled(template, {**fields, **more}) for template in self.files]
            for piece in self.side_by_side(name, files, inner, stored):
                found.append(piece if each is None else in_stack(piece, each))
        return found

    def side_by_side(
        self, name: str, files: Sequence[str], shape: tuple[int, ...], stored: Shapes | None
    ) -> list[Piece]:
        """Return the pieces of a parameter that ``files`` make in ``dim``.

        Args:
            name: the parameter.
            files: names of the files' tensors, in order.
            shape: of the parameter.
            stored: the shapes in the files; None where files are made.

        Raises:
            WeightsError: if shapes do not allow it.
        """
        if len(files) == 1:
            return [self._turned(same(files[0], shape))]
        dim = self._dim(name, len(shape))
        rows, odd = divmod(shape[dim], self.groups)
        sizes = self._sizes(files, rows, dim, stored)
        if odd or sum(sizes) != rows:
            raise WeightsError(
                f"{name} has {shape[dim]} indices along dim {dim}, which {self} cannot make of "
                f"{self.groups} x {sizes} of {', '.join(files)}; pass fitting parts or groups"
            )
        found = []
        for file, size, before in zip(files, sizes, _sums(sizes), strict=True):
            of_file = Box.whole(shape).along(dim, 0, self.groups * size)
            for group in range(self.groups):
                piece = Piece(
                    file,
                    of_file.size,
                    of_file.along(dim, group * size, size),
                    Box.whole(shape).along(dim, group * rows + before, size),
                    tuple(range(len(shape))),
                )
                found.append(self._turned(piece))
        return found

    def _sizes(self, files: Sequence[str], rows: int, dim: int, stored: Shapes | None) -> list[int]:
        """Return how many of ``rows`` each of ``files`` has."""
        if self.parts is None and stored is not None and all(file in stored for file in files):
            shapes = [stored[file] for file in files]
            ndim = len(shapes[0])
            if ndim > dim and all(len(shape) == ndim for shape in shapes):
                one, other = (each % ndim for each in self.transpose or (0, 0))
                there = {one: other, other: one}.get(dim, dim)
                return [shape[there] // self.groups for shape in shapes]
        parts = self.parts or (1,) * len(files)
        return [rows * part // sum(parts) for part in parts]

    # -- several parameters are one tensor of a file ----------------------------------------------

    def _split(self, index: int, fields: Mapping[str, str], params: Shapes) -> list[Piece]:
        counter = fields_of(self.models[0]) - fields_of(self.files[0])
        file = filled(self.files[0], fields)
        names = [filled(template, fields) for template in self.models]
        missing = [name for name in names if name not in params]
        if missing:
            raise WeightsError(
                f"{', '.join(missing)} is not in the model, and {self} needs it beside "
                f"{names[index]}"
            )
        piece = self.split(index, names, file, params) if len(names) > 1 else None
        if piece is None:
            piece = [self._turned(same(file, params[names[index]]))]
        if not counter:
            return piece
        (field,) = counter
        count = next(
            count
            for count in itertools.count()
            if filled(self.models[index], {**fields, field: str(count)}) not in params
        )
        if not fields[field].isdigit() or int(fields[field]) >= count:
            raise WeightsError(
                f"{names[index]} has {fields[field]} for {field}, and {self} counts from 0 to "
                f"{count - 1}: all that are stacked must be in the model"
            )
        return [_in_stack_of_file(each, int(fields[field]), count) for each in piece]

    def split(self, index: int, names: Sequence[str], file: str, params: Shapes) -> list[Piece]:
        """Return the pieces of a parameter of ``names``, into which ``file`` is split in ``dim``.

        Args:
            index: which one of ``names``.
            names: all of these parameters, in order.
            file: the name of the files' tensor.
            params: all of the model's shapes.

        Raises:
            WeightsError: if shapes do not allow it.
        """
        shape = params[names[index]]
        dim = self._dim(names[index], len(shape))
        rest = {params[name][:dim] + params[name][dim + 1 :] for name in names}
        if len(rest) > 1 or any(params[name][dim] % self.groups for name in names):
            shapes = ", ".join(f"{name} {params[name]}" for name in names)
            raise WeightsError(
                f"{shapes} cannot be one tensor along dim {dim} in {self.groups} groups, as {self} "
                "says"
            )
        sizes = [params[name][dim] // self.groups for name in names]
        rows, before, size = sum(sizes), _sums(sizes)[index], sizes[index]
        of_file = Box.whole(shape).along(dim, 0, self.groups * rows)
        return [
            self._turned(
                Piece(
                    file,
                    of_file.size,
                    of_file.along(dim, group * rows + before, size),
                    Box.whole(shape).along(dim, group * size, size),
                    tuple(range(len(shape))),
                )
            )
            for group in range(self.groups)
        ]

    # -- dims -------------------------------------------------------------------------------------

    def _dim(self, name: str, ndim: int) -> int:
        dim = self.dim + ndim if self.dim < 0 else self.dim
        if not 0 <= dim < ndim:
            raise WeightsError(f"{name} has {ndim} dims, and {self} cuts dim {self.dim}")
        return dim

    def _turned(self, piece: Piece) -> Piece:
        """Return ``piece``, of which ``transpose`` swaps two dims in the file."""
        if self.transpose is None:
            return piece
        ndim = len(piece.shape)
        one, other = (dim + ndim if dim < 0 else dim for dim in self.transpose)
        if not (0 <= one < ndim and 0 <= other < ndim):
            raise WeightsError(f"{piece.file} has {ndim} dims, and {self} swaps {self.transpose}")

        def swap(values: Sequence[int]) -> tuple[int, ...]:
            turned = list(values)
            turned[one], turned[other] = turned[other], turned[one]
            return tuple(turned)

        in_file = Box(swap(piece.in_file.start), swap(piece.in_file.size))
        return Piece(piece.file, swap(piece.shape), in_file, piece.in_param, swap(range(ndim)))


def _several(names: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _sums(sizes: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][: len(sizes)]


def _in_stack_of_file(piece: Piece, index: int, count: int) -> Piece:
    """Return ``piece`` of entry ``index`` of a new first dim of the file, of size ``count``."""
    box = Box((index, *piece.in_file.start), (1, *piece.in_file.size))
    return Piece(piece.file, (count, *piece.shape), box, piece.in_param, (None, *piece.dims))
