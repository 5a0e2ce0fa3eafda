"""What travels: the form that a buffer takes on the wire.

Owns: one of the three independent choices of a collective. A codec never changes the number of
elements and maps positive numbers to positive numbers, so that marks survive it. Refuses: scaling
(see ``scaling``) and moving bytes (see ``transport``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["CastCodec", "Codec", "IdentityCodec"]


class Codec(Protocol):
    """Turns a buffer into what travels, and back."""

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """What travels: same number of elements; ``tensor`` itself where nothing changes."""
        raise NotImplementedError

    def decode_into(self, wire: torch.Tensor, output: torch.Tensor) -> None:
        """Write what came off the wire to ``output``.

        They are the same object where the wire's dtype is the buffer's: then decode in place.
        """
        raise NotImplementedError

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a buffer of ``dtype`` travels."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class IdentityCodec:
    """Buffers travel as they are."""

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself."""
        return tensor

    def decode_into(self, wire: torch.Tensor, output: torch.Tensor) -> None:
        """Nothing, or a copy if the wire's buffer is not the output."""
        if wire is not output:
            output.copy_(wire)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """``dtype`` itself."""
        return dtype


@dataclass(frozen=True, slots=True)
class CastCodec:
    """Floating-point buffers travel as ``dtype``, others as they are.

    Others are integers, and the bytes of a buffer of mixed dtypes.

    Args:
        dtype: a floating-point dtype, for example ``torch.bfloat16``.

    Raises:
        ValueError: if ``dtype`` is not a floating-point dtype.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Refuse a dtype to which a gradient cannot be cast."""
        if not self.dtype.is_floating_point:
            raise ValueError(
                f"CastCodec got {self.dtype}; it must be a floating-point dtype such as "
                "torch.bfloat16."
            )

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` cast to the wire's dtype, or itself if it has it."""
        return tensor.to(self.wire_dtype(tensor.dtype))

    def decode_into(self, wire: torch.Tensor, output: torch.Tensor) -> None:
        """Cast back into ``output``."""
        if wire is not output:
            output.copy_(wire)

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The codec's dtype for floating-point buffers, ``dtype`` itself for others."""
        return self.dtype if dtype.is_floating_point else dtype
