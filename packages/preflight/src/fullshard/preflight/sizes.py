"""Sizes of memory as people write them."""

from __future__ import annotations

import re

__all__ = ["parse_bytes"]

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str) -> int:
    """Return the bytes that ``80GiB``, ``1.5 MiB`` or a number mean.

    Raises:
        ValueError: if it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(
            f"{text!r} is no size; write a number of bytes, or one with B, KiB, MiB, GiB or TiB, "
            "such as 80GiB"
        )
    return int(float(match[1]) * _UNITS[match[2]])
