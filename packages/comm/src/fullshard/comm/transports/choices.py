"""Checks of the three choices of a collective: transport, allocator, codec.

Owns: the errors, which name the choice at fault: what it lacks when it is given, and what it
answered wrongly when it is used. Refuses: what a collective as a whole must have (``collective``).
"""

from __future__ import annotations

from typing import TypeVar

import torch

from fullshard.comm.buffers.allocator import Allocator
from fullshard.comm.runtime.required import Method, require_methods
from fullshard.comm.transports.codec import Codec
from fullshard.comm.transports.transport import Transport

__all__ = ["encoded", "require_allocator", "require_codec", "require_transport", "wire_dtype"]

_TRANSPORT = (
    Method("all_gather", positional=("output", "input", "process_group", "async_op")),
    Method("reduce_scatter", positional=("output", "input", "process_group", "op", "async_op")),
)
_ALLOCATOR = (Method("empty", ("dtype", "device"), positional=("size",)),)
_CODEC = (
    Method("encode", positional=("tensor",)),
    Method("decode_into", positional=("wire", "output")),
    Method("wire_dtype", positional=("dtype",)),
)
_AnyTransport = TypeVar("_AnyTransport", bound=Transport)


def require_transport(value: _AnyTransport) -> _AnyTransport:
    """``value`` itself, once it is known to be a transport.

    Raises:
        TypeError: naming the method that is missing, or what ``in_place`` is instead of a bool.
    """
    see = "Add them; fullshard.comm.Transport says what each is for."
    require_methods(value, "Transport", _TRANSPORT, see)
    in_place = getattr(value, "in_place", None)
    if not isinstance(in_place, bool):
        raise TypeError(
            f"got {type(value).__name__}, which is no Transport: its in_place is {in_place!r}; it "
            "must be True where a gather's input may be this rank's slice of its output, else "
            "False."
        )
    return value


def require_allocator(value: Allocator) -> Allocator:
    """``value`` itself, once it is known to have the method of an allocator.

    Raises:
        TypeError: naming the method.
    """
    see = "Add it; it gives a tensor as torch.empty does."
    require_methods(value, "Allocator", _ALLOCATOR, see)
    return value


def require_codec(value: Codec) -> Codec:
    """``value`` itself, once it is known to be a codec.

    Raises:
        TypeError: naming the method that is missing, or what ``wire_dtype`` gives instead of a
            dtype.
    """
    see = "Add them; fullshard.comm.Codec says what each is for."
    require_methods(value, "Codec", _CODEC, see)
    for dtype in (torch.float32, torch.uint8):
        wire_dtype(value, dtype)
    return value


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


def encoded(codec: Codec, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as ``codec`` sends it.

    Raises:
        TypeError: if its answer is no tensor.
        ValueError: if it is not a contiguous tensor of as many elements, of the wire's dtype, on
            the same device.
    """
    sent = codec.encode(tensor)
    name = f"{type(codec).__name__}.encode"
    if not isinstance(sent, torch.Tensor):
        raise TypeError(f"{name} gave a {type(sent).__name__}; it must give a tensor.")
    wire = wire_dtype(codec, tensor.dtype)
    right = (wire, tensor.shape, tensor.device) == (sent.dtype, sent.shape, sent.device)
    if not right or not sent.is_contiguous():
        raise ValueError(
            f"{name} gave {tuple(sent.shape)} {sent.dtype} on {sent.device}, "
            f"{'' if sent.is_contiguous() else 'not '}contiguous, for {tuple(tensor.shape)} "
            f"{tensor.dtype}; it must give {tuple(tensor.shape)} {wire} (its wire_dtype) on "
            f"{tensor.device}, contiguous."
        )
    return sent
