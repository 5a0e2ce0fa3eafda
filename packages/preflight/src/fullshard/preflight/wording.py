"""Sizes of memory, and lists of names, as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["listed", "parse_bytes", "size_text"]

_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def size_text(nbytes: float) -> str:
    """Return a size in GiB, MiB or KiB."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 10 * 2**10 else f"{nbytes / 2**10:.2f} KiB"


def parse_bytes(text: str) -> int:
    """Return the bytes that ``80GiB``, ``70GB``, ``1.5 MiB`` or a number mean.

    Raises:
        ValueError: if it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"{text!r} is no size; write a number of bytes, or one with kB, MB, GB or TB (powers "
            "of 1000) or KiB, MiB, GiB or TiB (powers of 1024), such as 80GiB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
