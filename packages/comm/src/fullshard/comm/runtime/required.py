"""Checks that an object somebody hands in has the methods that it will be called with.

Owns: the errors that name what is missing or cannot be called so. Refuses: asking for base classes:
what has the methods is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Method", "require_methods"]


@dataclass(frozen=True)
class Method:
    """A method and how it is called: ``positional`` arguments first, then by ``keywords``."""

    name: str
    keywords: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As in a signature: ``allocate(size, *, dtype, device)``."""
        star = ("*",) if self.positional and self.keywords else ()
        return f"{self.name}({', '.join((*self.positional, *star, *self.keywords))})"

    def fits(self, value: object) -> bool:
        """Whether ``value`` has it, and it can be called so."""
        method = value if self.name == "__call__" else getattr(value, self.name, None)
        if not callable(method):
            return False
        try:
            signature = inspect.signature(method)
        except ValueError:  # written in C: nothing to check
            return True
        try:
            signature.bind(*(None for _ in self.positional), **dict.fromkeys(self.keywords))
        except TypeError:
            return False
        return True


def require_methods(value: object, kind: str, methods: Sequence[Method], advice: str) -> None:
    """Nothing, if ``value`` is an instance that has all ``methods``.

    Args:
        value: what somebody handed in.
        kind: what it is taken for, such as ``"AllGather"``.
        methods: what it is called with.
        advice: the end of the error: what to do.

    Raises:
        TypeError: naming the methods that are missing or take other arguments.
    """
    if inspect.isclass(value):
        raise TypeError(
            f"got the class {value.__name__}; {kind} must be an instance. Pass {value.__name__}()."
        )
    missing = [str(method) for method in methods if not method.fits(value)]
    if missing:
        raise TypeError(
            f"got {type(value).__name__}, which is no {kind}: it has no usable "
            f"{' and no '.join(missing)}. {advice}"
        )
