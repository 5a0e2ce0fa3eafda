"""The closure among the arguments of an optimizer's step.

Owns finding and wrapping it, for hooks before a step. It refuses to know what for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Closure", "StepArguments", "has_closure", "wrap_closure"]

Closure: TypeAlias = Callable[[], Any]

StepArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""What ``step`` is called with, the optimizer first, and by which names."""


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tells whether there is one: ``step(closure)`` or ``step(closure=closure)``."""
    return callable(kwargs.get("closure")) or callable(next(iter(args[1:]), None))


def wrap_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], around: Callable[[Closure], Closure]
) -> StepArguments:
    """Returns the arguments, with ``around(closure)`` for the closure, if there is one."""
    closure = kwargs.get("closure")
    if callable(closure):
        return args, {**kwargs, "closure": around(closure)}
    if has_closure(args, kwargs):
        return (args[0], around(args[1]), *args[2:]), kwargs
    return args, kwargs
