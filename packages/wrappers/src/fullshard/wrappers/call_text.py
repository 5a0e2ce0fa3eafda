"""How values stand in the text of a call.

Owns the text of one policy, for the helpers that print the calls a wrapped model stands for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["construction"]


def construction(value: Any) -> str:
    """Return the call that makes a dataclass instance, without fields that are as by default."""
    said = [
        f"{each.name}={getattr(value, each.name)!r}"
        for each in dataclasses.fields(value)
        if getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(said)})"
