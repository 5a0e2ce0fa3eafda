"""Finds the closure among the arguments of an optimizer's step, and wraps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Closure", "StepArguments", "wrap_closure"]

Closure: TypeAlias = Callable[[], Any]

StepArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""What ``step`` is called with, the optimizer first, and by which names."""


def wrap_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], around: Callable[[Closure], Closure]
) -> StepArguments:
    """Returns the arguments, with ``around(closure)`` for the closure, if there is one.

    ``step(closure)`` and ``step(closure=closure)`` both pass one.
    """
    closure = kwargs.get("closure")
    if callable(closure):
        return args, {**kwargs, "closure": around(closure)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], around(args[1]), *args[2:]), kwargs
    return args, kwargs
