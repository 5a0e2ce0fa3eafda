"""Named ranges in the traces of ``torch.profiler``, under the names that torch's FSDP gives.

Owns the names and the question whether anybody records. Refuses: costing anything without a
recording profiler: a range is then a call of a builtin, without a Python frame.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from torch.profiler import record_function

from fullshard.comm.runtime import compat

__all__ = ["NOTHING", "is_profiled", "named_range"]


class _Nothing:
    """``contextlib.nullcontext`` without its frames in Python, of which a step has hundreds."""

    __enter__ = __exit__ = "".format  # in C; takes anything, and its empty text lets errors pass


NOTHING: AbstractContextManager[None] = cast(Any, _Nothing())
"""A context that changes nothing: ``with named_range(...) if is_profiled() else NOTHING``."""

is_profiled: Callable[[], bool] = compat.is_profiled
"""Tells whether a profiler of torch records now, on this thread."""


def named_range(label: str, name: str) -> record_function:
    """A context that shows as ``FSDP::label (name)`` in a trace, without a name for the root."""
    return record_function(f"FSDP::{label}" + (f" ({name})" if name not in ("", "(root)") else ""))
