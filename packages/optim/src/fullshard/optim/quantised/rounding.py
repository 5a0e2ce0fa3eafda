"""Stochastic rounding to bf16 that no mesh changes: its random bits follow from the element.

Each element draws from its place in the whole parameter, the parameter's number, the step and a
seed, by SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators",
2014), whose n-th output is a function of n: nothing is kept, and shards draw what the whole would.
"""

from __future__ import annotations

import math

import torch

from fullshard.checkpoint.boxes import Box

__all__ = ["places_in", "rounded_to_bf16"]

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _signed(number: int) -> int:
    """Returns the 64 bits of ``number`` as torch's int64 has them."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def _mixed(number: int) -> int:
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Returns ``bits`` shifted to the right; zeros come in, whatever the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def places_in(shape: torch.Size, held: Box, device: torch.device) -> torch.Tensor:
    """Returns the place of each element of a shard in the whole parameter, flattened; int64."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (start, stop) in enumerate(zip(held.start, held.stop, strict=True)):
        stride = math.prod(shape[dim + 1 :])
        along = torch.arange(start, stop, device=device) * stride
        places = places + along.view(-1, *(1,) * (len(shape) - dim - 1))
    return places


def rounded_to_bf16(numbers: torch.Tensor, places: torch.Tensor, *keys: int) -> torch.Tensor:
    """Returns fp32 ``numbers`` as bf16, up or down with odds by the distance, so right on average.

    Args:
        numbers: any; what is infinite or no number stays so.
        places: of each, in the whole.
        keys: what else the draw depends on: seed, parameter, step.
    """
    start = 0
    for key in keys:
        start = _mixed((start + _GAMMA * (key + 1)) & _MASK)
    bits = places * _signed(_GAMMA)
    bits = bits.add_(_signed(start))
    bits = bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(_FIRST))
    bits = bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(_SECOND))
    drawn = _shifted(bits, 48).to(torch.int32)  # 16 bits: what bf16 cuts off
    raised = (numbers.contiguous().view(torch.int32) + drawn).bitwise_and_(-(1 << 16))
    return torch.where(numbers.isfinite(), raised.view(torch.float32), numbers).to(torch.bfloat16)
