"""Bad arguments are refused before any collective is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from comm.stand_ins import group_of
from fullshard.comm import (
    Layout,
    TensorSpec,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
)
from support.collectives import Allocates, gather_config, reduce_config


class _NeverCalled(Allocates):
    """A gather and a reduction that nobody may reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was called in spite of bad arguments")


class _WrongAllocation(_NeverCalled):
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.zeros(size[0] + 1, dtype=dtype)[1:]


PAIR = [TensorSpec(shape=(4, 2), dtype=torch.float32), TensorSpec(shape=(3,), dtype=torch.float32)]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([torch.zeros(2, 2)], r"blocks\.0: got 1 shards; the layout has 2 tensors"),
        ([torch.zeros(4, 2), torch.zeros(1)], r"shard 0 has shape \(4, 2\);.*\(2, 2\) on rank 1"),
        ([torch.zeros(2, 2), torch.zeros(2)], r"shard 1 has shape \(2,\);.*\(1,\) on rank 1"),
        ([torch.zeros(2, 2), torch.zeros(1, device="meta")], "shard 1 is on meta"),
        ([torch.zeros(2, 2), torch.zeros(1, dtype=torch.cfloat)], r"shard 1 .*torch\.complex64"),
    ],
    ids=["number", "unsharded", "wrong rank", "device", "dtype"],
)
def test_bad_shards_are_refused_before_any_collective(
    shards: list[torch.Tensor], message: str
) -> None:
    config = gather_config(group_of(1, 2), _NeverCalled(), name="blocks.0")
    with pytest.raises(ValueError, match=message):
        foreach_all_gather(shards, Layout(PAIR, 2), config)


def test_a_layout_for_another_world_is_refused() -> None:
    config = gather_config(group_of(0, 2), _NeverCalled())
    with pytest.raises(ValueError, match="for 4 ranks, the process group has 2"):
        foreach_all_gather([torch.zeros(1, 2), torch.zeros(1)], Layout(PAIR, 4), config)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([torch.zeros(4, 2)], "got 1 outputs"),
        ([torch.zeros(2, 4), torch.zeros(3)], r"output 0 has shape \(2, 4\)"),
        ([torch.zeros(2, 4).t(), torch.zeros(3)], "output 0 .* must be contiguous"),
        ([torch.zeros(4, 2), torch.zeros(3, device="meta")], "output 1 is on meta"),
        ([torch.zeros(4, 2, dtype=torch.int64), torch.zeros(3)], r"output 0 .*torch\.int64"),
    ],
    ids=["number", "shape", "strides", "device", "dtype"],
)
def test_bad_outputs_are_refused_and_the_gather_can_still_be_claimed(
    outputs: list[torch.Tensor], message: str
) -> None:
    group = group_of(0, 1)
    fulls = [torch.arange(8.0).view(4, 2), torch.arange(3.0)]
    config = gather_config(group)
    in_flight = foreach_all_gather(fulls, Layout(PAIR, 1), config)
    with pytest.raises(ValueError, match=message):
        foreach_all_gather_copy_out(in_flight, outputs)
    good = [torch.empty(4, 2), torch.empty(3)]
    foreach_all_gather_copy_out(in_flight, good)
    assert all(torch.equal(*pair) for pair in zip(good, fulls, strict=True))


def test_an_allocation_that_cannot_be_used_is_refused_by_the_name_of_its_class() -> None:
    config = gather_config(group_of(0, 1), _WrongAllocation())
    with pytest.raises(ValueError, match=r"_WrongAllocation\.allocate gave .*multiple of 16 bytes"):
        foreach_all_gather([torch.zeros(4, 2), torch.zeros(3)], Layout(PAIR, 1), config)


MIXED = [PAIR[0], TensorSpec(shape=(3,), dtype=torch.float64)]
WHOLE = [TensorSpec(shape=(3,), dtype=torch.int64)]


@pytest.mark.parametrize(
    ("layout", "gradients", "message"),
    [
        (Layout(PAIR, 2), [None], "got 1 gradients; the layout has 2"),
        (Layout(PAIR, 2), [None, torch.zeros(2)], r"gradient 1 has shape \(2,\)"),
        (Layout(PAIR, 2), [None, torch.zeros(3, device="meta")], "gradient 1 is on meta"),
        (Layout(PAIR, 2, mask_numel=1), [None, None], "a mask of 1 for 2 gradients"),
        (Layout(PAIR, 4), [None, None], "for 4 ranks, the process group has 2"),
        (Layout(MIXED, 2), [None, None], "needs one floating-point dtype"),
        (Layout(WHOLE, 2), [None], "needs one floating-point dtype"),
    ],
    ids=["number", "shape", "device", "mask", "world", "mixed", "integers"],
)
def test_bad_gradients_are_refused_before_any_collective(
    layout: Layout, gradients: list[torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        foreach_reduce(gradients, layout, reduce_config(group_of(0, 2), _NeverCalled()))


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex64]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_shards_are_cast_if_extreme_values_of_their_dtype_stay_what_they_are(
    source: torch.dtype,
) -> None:
    group, extremes = group_of(0, 1), _extremes(source)
    for target in DTYPES:
        spec = TensorSpec(shape=tuple(extremes.shape), dtype=target)
        cast = torch.stack([each.to(target).to(torch.complex128) for each in extremes])
        kept = torch.allclose(cast, extremes.to(torch.complex128), rtol=1e-2, atol=0)
        config = gather_config(group)
        try:
            foreach_all_gather([extremes], Layout([spec], 1), config).discard()
        except ValueError as error:
            assert not kept, f"{source} to {target}: {error}"
        else:
            assert kept, f"{source} to {target}"


def _extremes(dtype: torch.dtype) -> torch.Tensor:
    """Values that no dtype of another kind, and no narrower integer, holds."""
    if dtype is torch.bool:
        return torch.tensor([False, True])
    if dtype.is_complex:
        return torch.tensor([1 + 2j, -0.5j], dtype=dtype)
    if dtype.is_floating_point:
        return torch.tensor([1.75, -0.5], dtype=dtype)
    return torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)
