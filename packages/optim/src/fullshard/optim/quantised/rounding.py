"""Stochastic rounding to bf16 that no mesh changes: its random bits follow from the element.

The random bits of an element depend on its place in the whole parameter, the parameter's number,
the step and a seed (see ``fullshard.wire.draws``): nothing is kept, and shards draw what the whole
would.
"""

from __future__ import annotations

import math

import torch

from fullshard.checkpoint.spi import Box
from fullshard.wire.spi import drawn_bits

__all__ = ["places_in", "rounded_to_bf16"]


def places_in(shape: torch.Size, held: Box, device: torch.device) -> torch.Tensor:
    """Return the place of each element of a shard in the whole parameter, flattened; int64."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(zip(held.start, held.stop, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        along = torch.arange(start, stop, device=device) * stride
        places = places + along.view(-1, *(1,) * (len(shape) - dim - 1))
    return places


def rounded_to_bf16(numbers: torch.Tensor, places: torch.Tensor, *keys: int) -> torch.Tensor:
    """Return fp32 ``numbers`` as bf16, up or down with odds by the distance, so right on average.

    Args:
        numbers: any; infinities and NaN stay unchanged.
        places: of each, in the whole.
        keys: further keys of the draw: seed, parameter, step.
    """
    drawn = drawn_bits(places, 16, *keys).to(torch.int32)  # what bf16 cuts off
    raised = (numbers.contiguous().view(torch.int32) + drawn).bitwise_and_(-(1 << 16))
    return torch.where(numbers.isfinite(), raised.view(torch.float32), numbers).to(torch.bfloat16)
