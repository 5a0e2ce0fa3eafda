"""The dynamic map: 256 values that are dense near zero and near one, and the code of each number.

T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861, section 2.1,
after Dettmers 2015): leading zeros of a byte are a decimal exponent, the bit that ends them is an
indicator, and the rest divides the range from 0.1 to 1 into equal parts, of which a value is the
middle. Signed for averages of gradients, unsigned, with one more bit, for averages of squares.

A number is rounded to bf16 before its nearest value is looked up, in a table of all 65,536: that
takes a tenth of what a search takes. It is off by 2 ** -8 of itself at most then.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["decoded", "encoded", "values_of"]

_DECADES = 7


@functools.cache
def values_of(device: torch.device, *, signed: bool) -> torch.Tensor:
    """Returns the value of each code, ascending, ``[256]`` fp32."""
    values = [0.0, 1.0]
    for bits in range(_DECADES):
        count = 2**bits if signed else 2 ** (bits + 1)
        width = 0.9 / count
        for place in range(count):
            value = 10.0 ** (bits + 1 - _DECADES) * (0.1 + (place + 0.5) * width)
            values.extend((value, -value) if signed else (value,))
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@functools.cache
def _codes(device: torch.device, *, signed: bool) -> torch.Tensor:
    """Returns the code of the value nearest to each number of bf16, by its bits."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).float().nan_to_num(0.0, 1.0, -1.0).clamp(-1, 1)
    values = values_of(torch.device("cpu"), signed=signed)
    middles = (values[1:] + values[:-1]) / 2
    return torch.bucketize(numbers, middles).to(torch.uint8).to(device)


def encoded(numbers: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Returns the code of each of ``numbers``, which lie between -1 and 1."""
    bits = numbers.to(torch.bfloat16).view(torch.int16).reshape(-1)
    at = bits.to(torch.int32).bitwise_and_(0xFFFF)
    return _codes(numbers.device, signed=signed).index_select(0, at).view(numbers.shape)


def decoded(codes: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """Returns the value of each of ``codes``, fp32."""
    values = values_of(codes.device, signed=signed)
    return values.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
