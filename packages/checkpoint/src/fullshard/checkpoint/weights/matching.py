"""Which tensors of the files each parameter is made of, or is written to, by the user's rules.

Owns the forms of a user's rules, the choice among the names of tied parameters, and the report of
mismatches. This module reads and writes no file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import nn

from fullshard.checkpoint.files.headers import Stored, WeightsError
from fullshard.checkpoint.rules.conversions import conversions_of
from fullshard.checkpoint.rules.pieces import Piece, same
from fullshard.checkpoint.rules.rule import Rule, Shapes
from fullshard.checkpoint.weights.report import LoadReport
from fullshard.checkpoint.weights.tensors import ModelTensor

__all__ = ["Names", "Naming", "Rename", "Target", "matched_with", "names_of", "naming_of"]

Rename: TypeAlias = (
    Callable[[str], str | None] | Mapping[str, str | None] | Sequence[Rule] | Rule | None
)
"""From the model's names to those of the files.

A function, a table, or rules. None for a name: it is left alone. Names that a table or rules do not
have are the same on both sides.
"""


class Naming(Protocol):
    """A map from a model's tensors to names and layouts in files."""

    def pieces(self, name: str, params: Shapes, stored: Shapes | None) -> list[Piece]:
        """Return the pieces of a parameter; see ``Names.pieces``."""

    def ignores(self, name: str) -> bool:
        """Tell whether the files' tensor ``name`` is left alone."""


def naming_of(model: nn.Module, rename: Rename) -> Naming:
    """Return the naming by ``rename``; without it, transformers' naming of its own models."""
    return (conversions_of(model) if rename is None else None) or Names(rename)


class Names:
    """The naming of a user's ``rename``."""

    def __init__(self, rename: Rename) -> None:
        """Check its form.

        Raises:
            TypeError: if it has none of the forms.
        """
        self._rules: Sequence[Rule] = ()
        self._renamed: Callable[[str], str | None] = _identity
        if isinstance(rename, Rule):
            self._rules = (rename,)
        elif isinstance(rename, Mapping):
            table = dict(rename)
            self._renamed = lambda name: table.get(name, name)
        elif callable(rename):
            self._renamed = rename
        elif rename is not None:
            rules = rename if isinstance(rename, Sequence) else (None,)
            if not all(isinstance(each, Rule) for each in rules):
                raise TypeError(
                    f"rename is {rename!r}; pass a function or a dict from the model's names to "
                    "those of the files, or a list of fullshard.checkpoint.Rule"
                )
            self._rules = tuple(rename)

    def pieces(self, name: str, params: Shapes, stored: Shapes | None) -> list[Piece]:
        """Return the pieces of the parameter ``name``; none to leave it alone.

        Args:
            name: one of the model's.
            params: all of the model's shapes.
            stored: the shapes in the files; None where files are made.

        Raises:
            TypeError: if the user's function returns no name.
            WeightsError: if shapes do not allow the rule.
        """
        for rule in self._rules:
            if rule.fields(name) is not None:
                return rule.pieces(name, params, stored)
        file = self._renamed(name)
        if not isinstance(file, str | None):
            raise TypeError(f"rename gave {file!r} for {name}; return a name, or None")
        return [] if file is None else [same(file, params[name])]

    def ignores(self, name: str) -> bool:
        """Return whether the files' tensor ``name`` is skipped."""
        return any(rule.ignores(name) for rule in self._rules)


def _identity(name: str) -> str:
    return name


def names_of(tensors: Sequence[ModelTensor]) -> Shapes:
    """Return the shapes of ``tensors`` by every name."""
    return {name: each.shape for each in tensors for name in each.names}


@dataclass(frozen=True)
class Target:
    """A parameter or buffer, and what it is in the files."""

    tensor: ModelTensor
    pieces: tuple[Piece, ...]


def matched_with(
    tensors: Sequence[ModelTensor],
    names: Naming,
    stored: Mapping[str, Stored],
    dtype: torch.dtype | None,
) -> tuple[list[Target], LoadReport]:
    """Return what each of ``tensors`` is made of, and the report of what does not fit.

    Args:
        tensors: the model's.
        names: the names of the model's tensors in files.
        stored: the tensors of the files.
        dtype: that which floating tensors on the meta device get; None: their own.
    """
    params, shapes = names_of(tensors), {name: each.shape for name, each in stored.items()}
    report, targets, known = LoadReport(), [], set[str]()
    for tensor in tensors:
        candidates = []
        for name in tensor.names:
            try:
                candidates.append(names.pieces(name, params, shapes))
            except WeightsError as error:
                report.mismatched.append(str(error))
        known.update(piece.file for pieces in candidates for piece in pieces)
        if not all(candidates) or not candidates:
            continue  # skipped, or reported above
        found = [c for c in candidates if all(piece.file in stored for piece in c)]
        if not found:
            report.missing.append(_missing(tensor.name, candidates[0], stored))
            continue
        wrong = _wrong(tensor, found[0], stored, dtype)
        report.mismatched.extend(wrong)
        if not wrong:
            targets.append(Target(tensor, tuple(found[0])))
            report.loaded.append(tensor.name)
            report.ties.update(dict.fromkeys(tensor.names[1:], tensor.name))
    report.unexpected = [n for n in stored if n not in known and not names.ignores(n)]
    report.twice = _twice(targets)
    return targets, report


def _missing(name: str, pieces: Sequence[Piece], stored: Mapping[str, Stored]) -> str:
    lacking = list(dict.fromkeys(piece.file for piece in pieces if piece.file not in stored))
    return name if lacking == [name] else f"{name} (in the files {' and '.join(lacking)})"


def _wrong(
    tensor: ModelTensor,
    pieces: Sequence[Piece],
    stored: Mapping[str, Stored],
    dtype: torch.dtype | None,
) -> list[str]:
    """Return what of ``pieces`` cannot become ``tensor``, in words."""
    own = tensor.tensor.dtype
    if dtype is not None and own.is_floating_point:
        own = dtype
    found = []
    for file, shape in {piece.file: piece.shape for piece in pieces}.items():
        other = stored[file]
        what = tensor.name if tensor.name == file else f"{tensor.name} from {file}"
        if other.shape != shape:
            found.append(f"{what} has shape {other.shape} in {other.path.name}, it must be {shape}")
        elif other.dtype is None or not _casts(other.dtype, own):
            found.append(
                f"{what} is {other.dtype_name} in {other.path.name}, which is not cast to {own}"
            )
    return found


def _casts(stored: torch.dtype, own: torch.dtype) -> bool:
    """Return whether values are cast: between floating dtypes, and to wider integers.

    Integers in a floating parameter's place are quantised weights, and not its values.
    """
    if stored == own or (stored.is_floating_point and own.is_floating_point):
        return True
    neither = not (stored.is_floating_point or own.is_floating_point or own.is_complex)
    return (
        neither
        and torch.bool not in (stored, own)
        and torch.can_cast(stored, own)
        and (stored.itemsize < own.itemsize)
    )


def _twice(targets: Sequence[Target]) -> list[str]:
    """Return the files' tensors of which more is taken than they have, and who takes it."""
    taken, takers, sizes = Counter[str](), dict[str, list[str]](), dict[str, int]()
    for target in targets:
        for piece in target.pieces:
            taken[piece.file] += piece.in_param.numel
            sizes[piece.file] = math.prod(piece.shape)
            names = takers.setdefault(piece.file, [])
            if target.tensor.name not in names:
                names.append(target.tensor.name)
    return [
        f"{file} by {' and '.join(takers[file])}"
        for file, size in sizes.items()
        if taken[file] > size or (size == 0 and len(takers[file]) > 1)
    ]
