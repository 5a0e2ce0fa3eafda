"""What travels: the form that a buffer takes on the wire.

Owns: one of the three independent choices of a collective. A codec never changes the number of
elements and maps positive numbers to positive numbers, so that a used-parameter mask survives it.
Refuses: scaling (see ``scaling``) and moving bytes (see ``transport``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import Allocator
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.transports.transport import Transport

__all__ = ["CastCodec", "Codec", "CodedTransport", "IdentityCodec", "wire_dtype"]


class Codec(Protocol):
    """Turns a buffer into what travels, and back."""

    def encode(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """What travels: same number of elements; ``tensor`` itself where nothing changes."""

    def decode_into(self, wire: torch.Tensor, output: torch.Tensor, /) -> None:
        """Write what came off the wire to ``output``.

        They are the same object where the wire's dtype is the buffer's: then decode in place.
        """

    def wire_dtype(self, dtype: torch.dtype, /) -> torch.dtype:
        """The dtype in which a buffer of ``dtype`` travels."""


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


@dataclass(frozen=True)
class CodedTransport:
    """A transport between an encoding and a decoding; the wire's memory is of the allocator."""

    transport: Transport
    allocator: Allocator
    codec: Codec
    in_place: bool = True

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, *how: Any) -> dist.Work | None:
        """As ``Transport.all_gather``; a work handle's ``wait()`` also decodes."""
        sent = self._encode(input)
        if sent is input and not self.transport.in_place:
            sent = sent.clone()  # it may lie inside the output
        return self._move(self.transport.all_gather, output, sent, how)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *how: Any
    ) -> dist.Work | None:
        """As ``Transport.reduce_scatter``, in the wire's dtype; ``wait()`` also decodes."""
        return self._move(self.transport.reduce_scatter, output, self._encode(input), how)

    def _encode(self, tensor: torch.Tensor) -> torch.Tensor:
        sent = self.codec.encode(tensor)
        name = f"{type(self.codec).__name__}.encode"
        if not isinstance(sent, torch.Tensor):
            raise TypeError(f"{name} gave a {type(sent).__name__}; it must give a tensor.")
        wire = wire_dtype(self.codec, tensor.dtype)
        right = (wire, tensor.shape, tensor.device) == (sent.dtype, sent.shape, sent.device)
        if not right or not sent.is_contiguous():
            raise ValueError(
                f"{name} gave {tuple(sent.shape)} {sent.dtype} on {sent.device}, "
                f"{'' if sent.is_contiguous() else 'not '}contiguous, for {tuple(tensor.shape)} "
                f"{tensor.dtype}; it must give {tuple(tensor.shape)} {wire} (its wire_dtype) on "
                f"{tensor.device}, contiguous."
            )
        return sent

    def _move(
        self,
        collective: Callable[..., dist.Work | None],
        output: torch.Tensor,
        sent: torch.Tensor,
        how: Iterable[Any],
    ) -> dist.Work | None:
        dtype, wire = wire_dtype(self.codec, output.dtype), output
        if dtype is not output.dtype:
            wire = self.allocator.empty(output.shape, dtype=dtype, device=output.device)
        work, kept = collective(wire, sent, *how), [sent]  # until it has been sent

        def decode() -> None:
            kept.clear()
            self.codec.decode_into(wire, output)

        if work is not None:
            return SeveralWorks((work,), decode)
        decode()
        return None


def wire_dtype(codec: Codec, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ``codec`` sends a buffer of ``dtype``.

    Raises:
        TypeError: if its answer is no dtype.
    """
    found = codec.wire_dtype(dtype)
    if not isinstance(found, torch.dtype):
        raise TypeError(
            f"{type(codec).__name__}.wire_dtype gave {found!r} for {dtype}; it must give the "
            "torch.dtype in which such a buffer travels, its own where nothing changes."
        )
    return found
