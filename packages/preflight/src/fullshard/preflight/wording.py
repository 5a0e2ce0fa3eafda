"""Sizes and lists of names as reports and errors word them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["listed", "size_text"]


def size_text(nbytes: float) -> str:
    """Return a size in GiB, MiB or KiB."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 10 * 2**10 else f"{nbytes / 2**10:.2f} KiB"


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
