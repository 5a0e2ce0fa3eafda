"""Checks of single arguments: what came, what is allowed."""

from __future__ import annotations

__all__ = ["require_bool", "require_count"]


def require_bool(name: str, value: object) -> None:
    """Returns if ``value`` is a bool.

    Raises:
        TypeError: naming the argument and what came.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; pass True or False")


def require_count(name: str, value: object) -> None:
    """Returns if ``value`` is an int of at least 1.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is less than 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, a {type(value).__name__}; pass a positive int")
    if value < 1:
        raise ValueError(f"{name} is {value}; pass a positive int")
