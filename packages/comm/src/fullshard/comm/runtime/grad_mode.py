"""Functions that record no gradients, which many of the others call.

Owns one decorator. Refuses: turning gradients on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["without_grad"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_grad(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """``fn`` under ``torch.no_grad()``, which costs nothing where gradients are off already."""

    @functools.wraps(fn)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        with torch.no_grad():
            return fn(*args, **kwargs)

    return run
