"""How modules are wrapped inside an ``enable_wrap`` block, of FSDP1's and of FairScale's alike.

Owns the innermost block's answer. The wrappers open blocks and choose the modules to wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Enabled", "enabled", "enabling"]


@dataclass(frozen=True, kw_only=True)
class Enabled:
    """The arguments of ``enable_wrap``.

    Attributes:
        wrapper_cls: wraps a module, given arguments.
        arguments: those.
        policy: what FairScale's ``auto_wrap`` asks; None: its default.
    """

    wrapper_cls: Callable[..., nn.Module]
    arguments: dict[str, Any]
    policy: Callable[..., bool] | None = None


_enabled: ContextVar[Enabled | None] = ContextVar("enable_wrap", default=None)


def enabled() -> Enabled | None:
    """Return what the innermost block was given; None outside of any."""
    return _enabled.get()


@contextmanager
def enabling(given: Enabled) -> Iterator[None]:
    """Make ``enabled()`` return ``given`` inside a ``with`` block."""
    token = _enabled.set(given)
    try:
        yield
    finally:
        _enabled.reset(token)
