"""Named ranges in the traces of ``torch.profiler``, under the names that torch's FSDP gives.

Owns the names and the question whether anybody records. Refuses: costing anything when nobody does:
a range is a call of a builtin then, and no frame of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from fullshard.comm.runtime import compat

__all__ = ["is_profiled", "named_range", "ranged"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

is_profiled: Callable[[], bool] = compat.is_profiled
"""Tells whether a profiler of torch records now, on this thread."""


def named_range(label: str, name: str) -> record_function:
    """A context that shows as ``FSDP::label (name)`` in a trace, without a name for the root."""
    return record_function(f"FSDP::{label}" + (f" ({name})" if name not in ("", "(root)") else ""))


def ranged(label: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: the function under ``torch.no_grad()``, in a range while anybody records.

    The range has the name of the lane among its arguments.
    """

    def decorate(fn: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(fn)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if is_profiled():
                with torch.no_grad(), named_range(label, _lane_name((*args, *kwargs.values()))):
                    return fn(*args, **kwargs)
            if not torch.is_grad_enabled():
                return fn(*args, **kwargs)
            with torch.no_grad():
                return fn(*args, **kwargs)

        return run

    return decorate


def _lane_name(arguments: tuple[Any, ...]) -> str:
    names = (getattr(getattr(each, "lane", each), "name", None) for each in arguments)
    return next((name for name in names if isinstance(name, str)), "")
