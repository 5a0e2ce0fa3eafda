"""Numbers of 8 bits with a scale for each block of them: what a user names, and the arithmetic.

Owns the check of dtype and block size, and how a block becomes codes and numbers again. A block is
divided by its largest magnitude over the largest code, as in block-wise quantisation (T. Dettmers
et al., arXiv 2110.02861) and ZeRO++ (G. Wang et al., arXiv 2306.10209). Refuses: knowing the
positions of blocks (see ``blocks``).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from fullshard.comm.spi import traits_of
from fullshard.wire.feedback import ErrorFeedback

__all__ = ["Quantised"]

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_TINY = torch.finfo(torch.float32).tiny
_KEPT = ~0x7F  # 17 bits of a scale: its product with any code is exact in fp32
_SMALLEST, _LARGEST_BLOCK = 16, 4096
_HALF_SCALE = 2.0**8  # between fp16's exponents and e4m3's, of the same bits


@dataclass(frozen=True)
class Quantised:
    """A byte for each number, and an fp32 scale for each block of them.

    Blocks do not cross the rows of the whole parameter's last dim; each row begins with a new
    block. If a rank's shard ends inside a block, each part is its own block. A number is off by
    half a step of its block at most: the block's largest magnitude over 254 for int8, over 28 for
    e4m3 and over 14 for e5m2, whose small numbers are off by less. If a block contains infinity or
    NaN, all its numbers arrive as NaN; values below 1e-38 may arrive as 0.

    Attributes:
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block: numbers that share a scale: a power of two from 16 to 4096.
        seed: for gradients: they are rounded up or down with odds by the distance, so right on
            average, and off by a whole step at most. Draws follow from seed, parameter, step, rank
            and element, and no generator of torch's moves. None: to the nearest.
        feedback: for gradients: what rounding loses is kept, and added to the next gradient.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the dtype is none of the three, or the block of another size.
    """

    dtype: torch.dtype
    block: int = 256
    seed: int | None = None
    feedback: ErrorFeedback | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"Quantised got the dtype {self.dtype!r}; pass one such as torch.int8")
        if self.dtype not in _LARGEST:
            raise ValueError(
                f"Quantised got the dtype {self.dtype}; pass torch.int8, torch.float8_e4m3fn or "
                "torch.float8_e5m2, or give the policy torch.bfloat16 itself"
            )
        if not isinstance(self.block, int) or isinstance(self.block, bool):
            raise TypeError(f"Quantised got a block of {self.block!r}; pass an int such as 256")
        fits = _SMALLEST <= self.block <= _LARGEST_BLOCK and self.block.bit_count() == 1
        if not fits:
            raise ValueError(
                f"Quantised got a block of {self.block} numbers, which does not fit; pass a power "
                f"of two from {_SMALLEST} to {_LARGEST_BLOCK}"
            )

        if self.seed is not None and (not isinstance(self.seed, int) or self.seed < 0):
            raise ValueError(
                f"Quantised got the seed {self.seed!r}; pass an int from 0 on, or None"
            )
        if self.feedback is not None and not isinstance(self.feedback, ErrorFeedback):
            raise TypeError(
                f"Quantised got the feedback {self.feedback!r}; pass an ErrorFeedback(), or None"
            )

    def __str__(self) -> str:
        """The format on the wire, as text."""
        drawn = "" if self.seed is None else f" by draws of seed {self.seed}"
        fed = "" if self.feedback is None else f" with {self.feedback}"
        return f"{self.dtype} in blocks of {self.block}{drawn}{fed}"

    def casts_on(self, device: torch.device) -> bool:
        """Return whether torch can cast to these codes and back on ``device``."""
        return _casts(self.dtype, device.type)

    def encode(
        self,
        numbers: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        draws: torch.Tensor | None = None,
    ) -> None:
        """Fill codes and scales.

        Args:
            numbers: ``[..., width]``, of any floating-point dtype.
            codes: the same shape, in ``dtype``.
            scales: ``[...]``, fp32.
            draws: the shape of ``numbers``, from 0 to 1, by which they are rounded; None: to the
                nearest.
        """
        wide = numbers.float()
        found = wide.abs().amax(-1).div_(_LARGEST[self.dtype])  # 9 times as fast as aminmax
        # Scales of few bits make decoded numbers exact, so what is encoded again does not change.
        found = found.view(torch.int32).bitwise_and_(_KEPT).view(torch.float32).clamp_min_(_TINY)
        torch.add(found, found * 0.0, out=scales)  # infinity becomes NaN
        scaled = wide / found.unsqueeze(-1)
        if draws is not None:
            scaled = self._rounded_by(draws, scaled)
        codes.copy_(scaled if self.dtype.is_floating_point else scaled.round_())

    def _rounded_by(self, draws: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
        """Return a neighbour among the codes of each number."""
        steps = torch.ones_like(scaled)
        if self.dtype.is_floating_point:
            about = torch.finfo(self.dtype)
            smallest = round(math.log2(about.smallest_normal))
            exponents = torch.frexp(scaled).exponent.sub_(1).clamp_min_(smallest)
            steps = torch.ldexp(steps.fill_(about.eps), exponents)
        largest = _LARGEST[self.dtype]
        return scaled.div_(steps).add_(draws).floor_().mul_(steps).clamp_(-largest, largest)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, numbers: torch.Tensor) -> None:
        """Fill ``numbers``, in their dtype, with the values of codes and scales."""
        if self.dtype is torch.float8_e4m3fn and not traits_of(codes.device).queued:
            codes, scales = _in_half(codes), scales * _HALF_SCALE
        numbers.copy_(codes).mul_(scales.unsqueeze(-1))


def _in_half(codes: torch.Tensor) -> torch.Tensor:
    """Return e4m3 numbers over ``_HALF_SCALE`` as fp16: exact, except for the two codes of NaN.

    torch's own cast takes about ten times as long on CPUs. ``encode`` writes NaN to scales only.
    Sign, exponent and mantissa move to where fp16 has them. Its exponents are larger by 8.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign in all upper bits
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)


@functools.cache
def _casts(dtype: torch.dtype, device_type: str) -> bool:
    try:
        torch.zeros(1, device=device_type).to(dtype).to(torch.float32)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True
