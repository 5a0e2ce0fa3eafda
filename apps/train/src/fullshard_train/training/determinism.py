"""Repeatable kernels for a run, and the process's settings as they were before.

Owns what the trainer changes of a whole process: a program that calls `main` continues after it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["be_deterministic", "settings_put_back"]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def be_deterministic() -> None:
    """Make CUDA repeat itself bit for bit; the CPU kernels in use here always do."""
    # The setting that cuBLAS requires; read when its handle is made.
    os.environ.setdefault(_CUBLAS, ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # A debugging aid that comes with it and costs a write of every new buffer.
    _fill_new_buffers(False)


@contextmanager
def settings_put_back() -> Iterator[None]:
    """Put back what `be_deterministic` changes, warnings' filters, and torch's random state."""
    algorithms = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    cublas = os.environ.get(_CUBLAS)
    drawn = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)
        _fill_new_buffers(filled)
        torch.set_rng_state(drawn)
        if cublas is None:
            os.environ.pop(_CUBLAS, None)


def _fill_new_buffers(wanted: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = wanted  # type: ignore[attr-defined]
