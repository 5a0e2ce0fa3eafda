"""Reshard a tensor of a state, from the whole, or from the cut of another mesh."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.spi import box_here
from fullshard.sharding.spi import ShardingSpec, make_dtensor, spec_of

__all__ = ["recut"]


def recut(value: torch.Tensor, spec: ShardingSpec | None) -> torch.Tensor:
    """Return ``value`` with the sharding ``spec``; None: whole, a plain tensor.

    A ``DTensor`` that is cut otherwise is gathered: every rank of its mesh calls it.
    """
    if isinstance(value, DTensor):
        own = spec_of(value)
        if spec is not None and (own.placements, own.mesh) == (spec.placements, spec.mesh):
            return value
        whole: torch.Tensor = value.full_tensor()
        value = whole
    if spec is None:
        return value
    return make_dtensor(box_here(spec).of(value).clone(), spec)
