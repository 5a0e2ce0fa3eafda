"""Reads and writes of operations, and the source lines that issued them.

Owns the reading of an operator's schema, which names the written arguments, and the frames of the
two source lines in a report.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch

import fullshard
from fullshard.preflight.compat import schema_of
from fullshard.preflight.tensors import local_tensors

__all__ = ["Effects", "Line", "effects_of", "here"]

_ENGINE = tuple(fullshard.__path__)
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_STANDARD = str(Path(functools.__file__).parent)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program.

    Attributes:
        code: the innermost function that is neither torch's nor this package's.
        number: the line in it.
        user: the innermost function outside of fullshard, and the line in it; None if the same.
    """

    code: CodeType
    number: int
    user: tuple[CodeType, int] | None = None

    def __str__(self) -> str:
        """Return the text for a report."""
        told = _told(self.code, self.number)
        return told if self.user is None else f"{told}, from {_told(*self.user)}"


def _told(code: CodeType, number: int) -> str:
    path = Path(code.co_filename)
    roots = [Path(root).parent for root in _ENGINE if path.is_relative_to(root)]
    shown = path.relative_to(roots[0]) if roots else path.name
    return f"{shown}:{number} in {code.co_qualname}"


@functools.cache
def _kind(filename: str) -> int:
    """0: not to be shown; 1: the engine; 2: a user's."""
    if filename.startswith(_HIDDEN):
        return 0
    if filename.startswith(_ENGINE):
        return 1
    return 2 if "site-packages" in filename or not filename.startswith(_STANDARD) else 0


def here() -> Line | None:
    """The line that is being executed now."""
    frame = sys._getframe(1)
    found: tuple[CodeType, int] | None = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind:
            place = frame.f_code, frame.f_lineno
            if kind == 2:
                return Line(*place) if found is None else Line(*found, place)
            found = found or place
        frame = frame.f_back  # type: ignore[assignment]
    return None if found is None else Line(*found)


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of an operator on the memory of its arguments.

    Attributes:
        positions: of positional arguments, whether each is written.
        names: names of keyword arguments that are written.
        touches: whether it reads or writes at all; views do not.
        uses: whether it reads or writes the bytes of its arguments; ``zeros_like`` does not.
        allocates: whether it leaves its result as it came from the allocator.
        asks: whether the host waits for its result.
    """

    positions: tuple[bool, ...]
    names: frozenset[str]
    touches: bool
    uses: bool
    allocates: bool
    asks: bool

    def tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[torch.Tensor, bool]]:
        """Each tensor that is given, and whether it is written."""
        for value, written in zip(args, self.positions, strict=False):
            for tensor in local_tensors(value):
                yield tensor, written
        for name, value in kwargs.items():
            for tensor in local_tensors(value):
                yield tensor, name in self.names


_SHARES_UNSAID = {"aten::_unsafe_view", "aten::_reshape_alias"}
# Schemas that do not say that the running statistics are written.
_WRITES_UNSAID = {
    "aten::native_batch_norm": {"running_mean", "running_var"},
    "aten::cudnn_batch_norm": {"running_mean", "running_var"},
    "aten::miopen_batch_norm": {"running_mean", "running_var"},
}
_EMPTY = ("aten::empty", "aten::new_empty")
# Operators that take shape, dtype and device of a tensor, and none of its values.
_SHAPES_ALONE = re.compile(r"aten::(new_\w+|\w+_like|is_pinned|is_same_size|resize_|set_)")
_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@functools.cache
def effects_of(func: Any) -> Effects:
    """Return the effects of an operator, by its schema."""
    schema = schema_of(func)
    more = _WRITES_UNSAID.get(schema.name, set())
    written = [
        argument.name in more or bool(argument.alias_info and argument.alias_info.is_write)
        for argument in schema.arguments
    ]
    views = any(each.alias_info for each in schema.returns) and not any(written)
    only_metadata = torch.Tag.inplace_view in func.tags
    touches = not (views or only_metadata or schema.name in _SHARES_UNSAID)
    return Effects(
        positions=tuple(written),
        names=frozenset(
            argument.name for argument, flag in zip(schema.arguments, written, strict=True) if flag
        ),
        touches=touches,
        uses=touches and not _SHAPES_ALONE.fullmatch(schema.name),
        allocates=schema.name.startswith(_EMPTY),
        asks=not _ASKING.isdisjoint(func.tags),
    )
