"""Scaling against its definition: the sum over ranks divided by the factor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fullshard.comm import ReduceScaling, reduction_scaling
from fullshard.comm.layouts.scaling import backend_averages
from support.ranks import distributed, world

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def reduce_by_hand(gradients: list[torch.Tensor], scaling: ReduceScaling) -> torch.Tensor:
    """What a backend does: add one rank after the other, in the gradients' dtype."""
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        total = total + gradient * scaling.pre
    if scaling.op == dist.ReduceOp.AVG:
        total = total / len(gradients)
    return total * scaling.post


@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("force_sum", [True, False])
@pytest.mark.parametrize("factor", [None, 1.0, 3.0, 0.25, 8.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_result_is_the_sum_divided_by_the_factor(
    world_size: int, dtype: torch.dtype, factor: float | None, force_sum: bool, averages: bool
) -> None:
    scaling = reduction_scaling(
        world_size, dtype, averages=averages, divide_factor=factor, force_sum=force_sum
    )
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(64, generator=generator).to(dtype) for _ in range(world_size)]
    exact = sum(each.double() for each in gradients) / (factor or world_size)
    assert isinstance(exact, torch.Tensor)
    # Each of the world_size additions and two multiplications rounds once.
    bound = (world_size + 2) * torch.finfo(dtype).eps * world_size * 4 / (factor or world_size)
    difference = (reduce_by_hand(gradients, scaling).double() - exact).abs().max().item()
    assert difference <= bound


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_backend_averages_only_where_that_means_the_same(dtype: torch.dtype) -> None:
    average = dist.ReduceOp.AVG
    wanted = average if dtype is not torch.float16 else dist.ReduceOp.SUM
    assert reduction_scaling(4, dtype, averages=True).op == wanted
    assert reduction_scaling(4, dtype, averages=True, divide_factor=4.0).op == wanted
    assert reduction_scaling(4, dtype, averages=True, divide_factor=2.0).op != average
    assert reduction_scaling(4, dtype, averages=True, force_sum=True).op != average
    assert reduction_scaling(4, dtype, averages=False).op != average


def test_fp16_at_128_ranks_needs_the_division_to_be_split() -> None:
    gradients = [torch.full((4,), 1024.0, dtype=torch.float16)] * 128
    scaling = reduction_scaling(128, torch.float16, averages=True)
    assert torch.equal(reduce_by_hand(gradients, scaling), gradients[0])  # exactly: powers of two
    unsplit = ReduceScaling(op=dist.ReduceOp.SUM, pre=1.0, post=1 / 128, used=1.0)
    assert reduce_by_hand(gradients, unsplit).isinf().all()


def test_fp16_at_128_ranks_keeps_small_gradients_that_dividing_first_would_lose() -> None:
    smallest = 2.0**-24  # the smallest fp16 above zero
    gradients = [torch.full((1,), 16 * smallest, dtype=torch.float16)] * 128
    scaling = reduction_scaling(128, torch.float16, averages=False)
    assert reduce_by_hand(gradients, scaling).item() == 16 * smallest
    first = ReduceScaling(op=dist.ReduceOp.SUM, pre=1 / 128, post=1.0, used=1.0)
    assert reduce_by_hand(gradients, first).item() != 16 * smallest


@given(st.floats(1.0, 1e9))
def test_fp16_divides_before_by_a_power_of_two_near_the_square_root(factor: float) -> None:
    scaling = reduction_scaling(2, torch.float16, averages=False, divide_factor=factor)
    assert math.frexp(scaling.pre)[0] == 0.5  # a power of two: exact
    assert scaling.pre * math.sqrt(factor) * (1 + 1e-9) >= 2**-0.5
    assert scaling.pre * math.sqrt(factor) <= 2**0.5 * (1 + 1e-9)
    assert scaling.pre * scaling.post == pytest.approx(1 / factor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 300, 4096])
def test_one_rank_that_marks_is_enough_for_a_result_of_one(
    world_size: int, averages: bool, dtype: torch.dtype
) -> None:
    scaling = reduction_scaling(world_size, dtype, averages=averages)
    mark = torch.tensor(scaling.used, dtype=dtype)
    result = mark / world_size if scaling.op == dist.ReduceOp.AVG else mark
    assert result.item() >= 1.0


@pytest.mark.parametrize(
    ("world_size", "dtype", "factors", "message"),
    [
        (2, torch.float32, (0.0, -1.0, math.inf, math.nan), "divide_factor"),
        (2, torch.float32, (torch.ones(2),), "0-d"),
        (0, torch.float32, (None,), "world_size 0"),
        (2, torch.int64, (None,), r"torch\.int64"),
    ],
)
def test_what_cannot_scale_is_refused(
    world_size: int, dtype: torch.dtype, factors: tuple[Any, ...], message: str
) -> None:
    for factor in factors:
        with pytest.raises(ValueError, match=message):
            reduction_scaling(world_size, dtype, averages=False, divide_factor=factor)


@distributed(2)
def test_gloo_is_not_asked_to_average() -> None:
    group = world()
    assert not backend_averages(group, torch.float32)
    assert not backend_averages(group, torch.float32, torch.device("cpu"))


class _NamedBackend:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


class _NamedGroup:
    """A group whose devices are served by the given backends."""

    def __init__(self, **backends: str) -> None:
        self._backends = {torch.device(kind): name for kind, name in backends.items()}
        self._device_types = list(self._backends)

    def _get_backend(self, device: torch.device) -> _NamedBackend:
        return _NamedBackend(self._backends[torch.device(device.type)])


def test_nccl_is_asked_to_average_floating_point_gradients() -> None:
    both = _NamedGroup(cpu="gloo", cuda="NCCL")
    cuda = torch.device("cuda", 0)
    assert backend_averages(both, torch.bfloat16, cuda)  # type: ignore[arg-type]
    assert backend_averages(_NamedGroup(cuda="nccl"), torch.float32)  # type: ignore[arg-type]
    assert not backend_averages(both, torch.float32)  # type: ignore[arg-type]
    assert not backend_averages(both, torch.int32, cuda)  # type: ignore[arg-type]
    assert not backend_averages(object(), torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 3.0, 4.0, 128.0, 70_000.0, 2.0**20])
def test_a_divisor_on_the_device_scales_as_the_number_in_it(
    dtype: torch.dtype, factor: float
) -> None:
    number = reduction_scaling(4, dtype, averages=False, divide_factor=factor)
    tensor = reduction_scaling(4, dtype, averages=True, divide_factor=torch.tensor(factor))
    assert tensor.op == number.op, "a sum, whatever the backend can do"
    assert (float(tensor.pre), tensor.used) == (number.pre, number.used)
    assert float(tensor.post) == pytest.approx(number.post, rel=1e-6)


def test_a_divisor_on_the_device_is_not_read_by_the_host() -> None:
    with FakeTensorMode():  # in which any look at a value raises
        count = torch.tensor(512)
        for dtype in (torch.float32, torch.float16):
            scaling = reduction_scaling(4, dtype, averages=True, divide_factor=count)
            assert isinstance(scaling.post, torch.Tensor) and scaling.post.ndim == 0
