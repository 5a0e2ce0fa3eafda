"""Random bits as a function of a counter, without state and without a torch generator.

SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", 2014),
whose n-th output is a function of n: an element draws from its place in the whole parameter and
from what else its draw is to depend on, so no mesh changes it. Refuses: rounding by them.
"""

from __future__ import annotations

import torch

__all__ = ["drawn_bits"]

_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def drawn_bits(places: torch.Tensor, count: int, *keys: int) -> torch.Tensor:
    """Return ``count`` random bits for each of ``places``, int64 from 0 on.

    Args:
        places: int64, of each element in the whole.
        count: from 1 to 63.
        keys: other inputs of the draw: seed, parameter, step.
    """
    start = 0
    for key in keys:
        start = _mixed((start + _GAMMA * (key + 1)) & _MASK)
    bits = places * _signed(_GAMMA)
    bits = bits.add_(_signed(start))
    bits = bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(_FIRST))
    bits = bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(_SECOND))
    return _shifted(bits, 64 - count)


def _signed(number: int) -> int:
    """Return the 64 bits of ``number`` as torch's int64 has them."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def _mixed(number: int) -> int:
    number = ((number ^ (number >> 30)) * _FIRST) & _MASK
    number = ((number ^ (number >> 27)) * _SECOND) & _MASK
    return number ^ (number >> 31)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Return ``bits`` shifted to the right; zeros come in, whatever the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)
