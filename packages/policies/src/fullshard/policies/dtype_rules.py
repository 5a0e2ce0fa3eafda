"""Rules that give single parameters a dtype: by a pattern of their full name, or by a predicate.

Owns their checked form and the lookup: the first rule that matches. Rules hold no mutable object,
    so a policy with rules is frozen, equal by value and hashable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TypeAlias

import torch

__all__ = ["DTypePredicate", "DTypeRules", "checked_dtype", "checked_rules", "first_match"]

DTypePredicate: TypeAlias = Callable[[str, torch.dtype], bool]
"""Tells, given a parameter's full name and the dtype it is stored in, whether a rule is meant."""

DTypeRules: TypeAlias = (
    Mapping[str, torch.dtype | None]  # a mapping is invariant in its keys, so each has its own line
    | Mapping[DTypePredicate, torch.dtype | None]
    | Mapping[str | DTypePredicate, torch.dtype | None]
    | Iterable[tuple[str | DTypePredicate, torch.dtype | None]]
)
"""Rules in the order in which they are tried, as a mapping or as pairs."""

_Checked: TypeAlias = tuple[tuple[str | DTypePredicate, torch.dtype | None], ...]


def checked_dtype(what: str, value: object) -> None:
    """Return if ``value`` is a floating-point dtype or None.

    Raises:
        TypeError: if it is neither, naming ``what``.
    """
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError(f"{what} is {value!r}; pass a floating-point torch.dtype or None")


def checked_rules(what: str, rules: object) -> _Checked:
    """Return ``rules`` as pairs.

    Raises:
        TypeError: if they are not a mapping or pairs, or one is not of a pattern or a predicate and
            a dtype; naming ``what``.
        ValueError: if a pattern is empty, which no name matches.
    """
    if isinstance(rules, (str, bytes)) or not isinstance(rules, Iterable):
        raise TypeError(
            f"{what} is {rules!r}; pass a dict from patterns of parameter names, such as "
            "'*norm*', to dtypes, or pairs of them"
        )
    pairs = tuple(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"{what} holds {pair!r}; pass pairs (pattern or predicate, dtype)")
        match, dtype = pair
        if not (isinstance(match, str) or callable(match)):
            raise TypeError(
                f"{what} holds {match!r}; pass a pattern such as '*norm*', or a function from a "
                "parameter's name and dtype to a bool"
            )
        if match == "":
            raise ValueError(f"{what} holds an empty pattern, which matches no parameter")
        checked_dtype(f"{what}[{match!r}]", dtype)
    return pairs


def first_match(
    rules: DTypeRules, name: str, dtype: torch.dtype, default: torch.dtype | None
) -> torch.dtype | None:
    """Return the dtype of the first rule that matches; ``default`` if none does."""
    for match, chosen in rules.items() if isinstance(rules, Mapping) else rules:
        if fnmatchcase(name, match) if isinstance(match, str) else match(name, dtype):
            return chosen
    return default
