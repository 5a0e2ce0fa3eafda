"""What travels: the same number of elements, positive where it was positive."""

from __future__ import annotations

import pytest
import torch

from fullshard.comm import CastCodec, Codec, IdentityCodec

CODECS: list[Codec] = [IdentityCodec(), CastCodec(torch.bfloat16), CastCodec(torch.float16)]


def test_identity_sends_the_very_tensor() -> None:
    tensor, codec = torch.ones(3), IdentityCodec()
    assert codec.encode(tensor) is tensor
    assert codec.wire_dtype(torch.int16) is torch.int16
    codec.decode_into(tensor, tensor)
    output = torch.zeros(3)
    codec.decode_into(tensor, output)
    assert torch.equal(output, tensor)


def test_cast_rounds_once_to_the_wires_dtype() -> None:
    tensor, codec = torch.linspace(-3, 3, 50), CastCodec(torch.bfloat16)
    wire = codec.encode(tensor)
    assert wire.dtype is codec.wire_dtype(tensor.dtype) is torch.bfloat16
    output = torch.empty_like(tensor)
    codec.decode_into(wire, output)
    assert torch.equal(output, tensor.to(torch.bfloat16).float())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.bfloat16])
def test_cast_leaves_bytes_integers_and_its_own_dtype_alone(dtype: torch.dtype) -> None:
    tensor, codec = torch.ones(3, dtype=dtype), CastCodec(torch.bfloat16)
    assert codec.encode(tensor) is tensor
    assert codec.wire_dtype(dtype) is dtype


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_mask_stays_positive_and_the_number_of_elements_stays(codec: Codec) -> None:
    mask = torch.tensor([1.0, 0.0, 2.0, 4096.0])
    wire = codec.encode(mask)
    assert wire.shape == mask.shape
    output = torch.empty_like(mask)
    codec.decode_into(wire, output)
    assert (output > 0).tolist() == [True, False, True, True]


def test_a_wire_that_is_not_floating_point_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.int8; it must be a floating-point dtype"):
        CastCodec(torch.int8)
