"""Gradients that an offload policy stores, in files for example, and reads for a step.

Owns the protocol of such a policy: ``GradientStore``. Clipping and optimizer steps ask it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch

from fullshard.sharding.spi import declares, owner_of

__all__ = ["GradientStore", "gradient_stores_of"]


class GradientStore(Protocol):
    """An offload policy that declares ``stores_gradients``: ``stage_out`` stores them."""

    def read_in(self, gradient: torch.Tensor) -> bool:
        """Bring a gradient into memory before the host reads it; False if that is not possible."""


def gradient_stores_of(params: Iterable[torch.Tensor]) -> dict[int, GradientStore]:
    """Return the offload policies that store gradients, by the places of their parameters."""
    return {
        at: cast(GradientStore, owner.offload)
        for at, owner in enumerate(map(owner_of, params))
        if owner is not None and declares(owner.offload, "stores_gradients")
    }
