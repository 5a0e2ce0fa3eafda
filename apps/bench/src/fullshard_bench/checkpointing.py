"""Activation checkpointing of units, the same for every contestant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["recompute_units"]


def recompute_units(units: Sequence[nn.Module]) -> None:
    """Makes each unit drop its activations in forward and compute them again in backward."""
    for unit in units:
        unit.forward = _recomputing(unit.forward)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed
