"""Which tests of a product of parameters run in ``tests``, and which in ``nox -s matrix`` only.

Owns the meaning of ``@pytest.mark.cross``: of the product of all that a test is parametrised with,
its world sizes among them, ``tests`` runs what differs from the first case in one parameter at
most. So every value runs, and the first of each says what it is combined with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def few(values: Iterable[Any], *first: Any, together: bool = False) -> list[Any]:
    """Return ``values`` for ``parametrize``: ``tests`` runs those of ``first``, the matrix all.

    Args:
        values: all values of a parameter; of several parameters if ``together``.
        first: the values that ``tests`` runs.
        together: each value is a tuple with a value for each of several names.
    """
    listed = list(values)
    assert all(each in listed for each in first), "a value that is not there"
    return [
        each
        if each in first
        else pytest.param(*(each if together else (each,)), marks=pytest.mark.matrix)
        for each in listed
    ]


def mark_crosses(items: Sequence[pytest.Item]) -> None:
    """Marks ``matrix`` what is marked ``cross`` and differs from its first case in two or more."""
    for item in items:
        called = getattr(item, "callspec", None)
        if called is None or item.get_closest_marker("cross") is None:
            continue
        if changes(called.params, item.iter_markers("parametrize")) > 1:
            item.add_marker("matrix")


def changes(params: Mapping[str, Any], parametrized: Iterable[pytest.Mark]) -> int:
    """In how many of its parameters a test differs from the first case of each.

    Args:
        params: the test's own values, by name; the very objects that the marks have.
        parametrized: the test's marks, each of one or several names that go together.
    """
    return sum(not _is_first(params, *mark.args[:2]) for mark in parametrized)


def _is_first(params: Mapping[str, Any], argnames: str | Sequence[str], values: Any) -> bool:
    names = argnames.replace(",", " ").split() if isinstance(argnames, str) else list(argnames)
    first = next(iter(values))
    if isinstance(first, type(pytest.param())):
        first = first.values
    elif len(names) == 1:
        first = (first,)
    return all(params[name] is value for name, value in zip(names, first, strict=True))
