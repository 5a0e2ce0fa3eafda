"""Answers to the host's reads of tensors without values, where a harmless answer exists.

A float is 1.0, for a log. A check for NaN or infinity finds none: ``HostReads`` follows the results
of such checks while all elements of a result are one known number.
"""

from __future__ import annotations

import math
import operator
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from fullshard.preflight.compat import HOST_READ, WeakIdKeyDictionary, is_fake, schema_of
from fullshard.preflight.planning.failures import PlanError, line_of

__all__ = ["HostReads"]

_LOGGED = 1.0  # what a float is; a logarithm and a division take it
_MOST = 10_000  # reads in one line of code; more are a loop that waits for a value
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "aten::eq": operator.eq, "aten::ne": operator.ne, "aten::gt": operator.gt,
    "aten::ge": operator.ge, "aten::lt": operator.lt, "aten::le": operator.le,
}  # fmt: skip
_UNARY: dict[str, Callable[[Any], Any]] = {
    "aten::any": bool, "aten::all": bool,
    "aten::logical_not": operator.not_, "aten::bitwise_not": operator.not_,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "aten::mul": operator.mul, "aten::logical_and": operator.and_,
    "aten::bitwise_and": operator.and_, "aten::logical_or": operator.or_,
    "aten::bitwise_or": operator.or_, "aten::add": operator.add,
}  # fmt: skip
_SAME = ("aten::view", "aten::reshape", "aten::_to_copy", "aten::clone", "aten::detach",
         "aten::squeeze", "aten::unsqueeze", "aten::expand", "aten::alias")  # fmt: skip


class HostReads:
    """Answers to the host's reads, as if all numbers were finite.

    Attributes:
        lines: how often each line of the user's code read a float.
    """

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._known = WeakIdKeyDictionary()

    def answer(self, func: Any, args: Any) -> float | int | bool | None:
        """Return what the host reads; None if this is no read, or there is no harmless answer.

        Raises:
            PlanError: if a line reads again and again.
        """
        if func is not HOST_READ or not is_fake(args[0]):
            return None
        known: float | int | bool | None = self._known.get(args[0])
        if known is None and args[0].dtype.is_floating_point:
            line = line_of(frame for frame, _ in traceback.walk_stack(sys._getframe()))
            self.lines[line] += 1
            if self.lines[line] > _MOST:
                raise PlanError(
                    f"{line} read a float {_MOST} times, each time as {_LOGGED}, since a plan has "
                    "no values; plan a variant whose loop runs a fixed number of times"
                )
            return _LOGGED
        return known

    def follow(self, func: Any, args: Any, result: Any) -> None:
        """Record the number that all elements of a result have, if it is known."""
        if not isinstance(result, torch.Tensor) or result.dtype.is_floating_point:
            return
        found = self._found(schema_of(func).name, args)
        if found is not None:
            self._known[result] = bool(found) if result.dtype is torch.bool else found
        elif result in self._known:  # an operation in place
            del self._known[result]

    def _found(self, name: str, args: Any) -> float | int | bool | None:
        """Return the number that all elements of a result have; None if it is not known."""
        if name in ("aten::isnan", "aten::isinf"):
            return False
        if name in _COMPARISONS:
            return self._compared(_COMPARISONS[name], *args[:2])
        first = args[0] if args else None
        known: float | bool | None = None
        if isinstance(first, torch.Tensor):
            known = self._known.get(first)
        if known is None:
            return None
        if name in _UNARY:
            return _UNARY[name](known) if isinstance(known, bool) else None
        if name in _SAME:
            return known
        if name == "aten::sum":
            return known * args[0].numel() if len(args) < 2 else None
        if name in _BINARY:
            other = self._number(args[1])
            return None if other is None else _BINARY[name](known, other)
        return None

    def _compared(self, compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool | None:
        """Compare known numbers, a tensor with itself, or a float with infinity."""
        if left is right:
            return compare(_LOGGED, _LOGGED)
        known, other = self._number(left), self._number(right)
        if known is None and isinstance(other, float) and math.isinf(other):
            known = _LOGGED
        return None if known is None or other is None else compare(known, other)

    def _number(self, value: Any) -> Any:
        return self._known.get(value) if isinstance(value, torch.Tensor) else value
