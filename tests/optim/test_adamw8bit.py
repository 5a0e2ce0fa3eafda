"""AdamW8bit on every mesh is what it is on the unsharded model, given equal gradients."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.boxes import Box
from fullshard.optim import AdamW8bit
from fullshard.optim.quantised.blocks import Blocks
from fullshard.optim.quantised.dynamic_map import decoded, encoded, tables_on
from fullshard.optim.quantised.rounding import places_in, rounded_to_bf16
from support.optim.given import GivenSteps
from support.optim.ways import WAYS, give
from support.optim.wide import SHAPES, Wide, wide_gradients
from support.products import few
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads


def _adamw8bit(model: nn.Module, **options: Any) -> AdamW8bit:
    return AdamW8bit(model.parameters(), **{"lr": 0.01, **options})


STEPS = GivenSteps(module=Wide, gradients=wide_gradients, make=_adamw8bit, count=3)


@pytest.mark.parametrize("way", few(WAYS, "hybrid", "tensor parallel", "columns", "three"))
def test_parameters_codes_and_scales_are_those_of_the_unsharded_model(way: str) -> None:
    STEPS.assert_the_same(WAYS[way])


@pytest.mark.cross
@pytest.mark.parametrize("rounding", ["stochastic", "residual", "nearest"])
@pytest.mark.parametrize("way", ["three", "columns", "tensor parallel"])
def test_bf16_parameters_are_rounded_alike_on_every_mesh(way: str, rounding: str) -> None:
    STEPS.assert_the_same(WAYS[way], torch.bfloat16, rounding=rounding)


def test_a_seed_changes_what_is_rounded_up_and_a_step_does() -> None:
    first, again, other = (
        STEPS.whole(torch.bfloat16, seed=seed)[0]["square"] for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_the_whole_shape_says_what_has_8_bits() -> None:
    state = STEPS.whole()[1]
    quantised = {name for name, each in state.items() if each["exp_avg"].dtype is torch.uint8}
    assert quantised == {"square", "wide", "tall", "uneven", "experts", "fused"}
    for name in quantised:
        shape = SHAPES[name]
        assert state[name]["exp_avg_scale"].shape == (*shape[:-1], -(-shape[-1] // 256))
    assert state["few"]["exp_avg"].dtype is torch.float32


def test_the_state_takes_26_percent_of_adamws_bytes_at_most() -> None:
    weights = [nn.Parameter(torch.randn(256, 1024)), nn.Parameter(torch.randn(768, 384))]
    sizes = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        optimizer = kind(weights)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        sizes.append(sum(tensor.nbytes for tensor in tensors))
    assert sizes[0] <= 0.26 * sizes[1]


def test_scales_are_placed_as_their_parameter_where_rows_are_whole() -> None:
    def body(rank: ThreadRank, way: str) -> bool:
        model = Wide()
        WAYS[way].apply(model)
        optimizer = AdamW8bit(model.parameters())
        give(model, wide_gradients(0), WAYS[way])
        optimizer.step()
        state = optimizer.state[model.get_parameter("square")]
        assert isinstance(state["exp_avg"], DTensor)
        return isinstance(state["exp_avg_scale"], DTensor)

    assert run_program_on_threads(body, 2, "two") == [True] * 2
    assert run_program_on_threads(body, 3, "columns") == [False] * 3


def test_blocks_that_are_cut_take_one_all_reduce_for_all_parameters() -> None:
    calls: list[int] = []
    real = dist.all_reduce

    def counted(*args: Any, **how: Any) -> Any:
        calls.append(dist.get_rank())
        return real(*args, **how)

    def body(rank: ThreadRank) -> None:
        model = Wide()
        WAYS["columns"].apply(model)
        optimizer = AdamW8bit(model.parameters())
        for step in range(2):
            give(model, wide_gradients(step), WAYS["columns"])
            optimizer.step()

    with patch.object(dist, "all_reduce", counted):
        run_program_on_threads(body, 3)
    assert sorted(calls) == [0, 0, 1, 1, 2, 2]


def test_it_stays_close_to_adamw() -> None:
    """Half of the distance that AdamW itself goes, at most, in any element."""
    torch.manual_seed(0)
    start, target = torch.randn(64, 256), torch.randn(64, 256)
    ends = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        weight = nn.Parameter(start.clone())
        optimizer = kind([weight], lr=0.01, weight_decay=0.0)
        for _ in range(50):
            optimizer.zero_grad()
            (weight - target).square().sum().backward()
            optimizer.step()
        ends.append(weight.detach())
    assert (ends[0] - target).square().mean() < 1.02 * (ends[1] - target).square().mean()


def _mixed(together: int) -> list[torch.Tensor]:
    """What steps of many kinds leave; ``together``: elements that a batch may have."""
    generator = torch.Generator().manual_seed(3)
    kinds: list[tuple[torch.dtype, tuple[int, ...]]]
    kinds = [(torch.float32, (16, 256)), (torch.bfloat16, (17, 300)), (torch.float64, (64, 64))]
    kinds += [(torch.float32, (32, 512)), (torch.bfloat16, (16, 256)), (torch.float32, (70,))]
    first, second, late = (
        [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for dtype, shape in kinds]
        for _ in range(3)
    )
    optimizer = AdamW8bit(first)
    optimizer.add_param_group({"params": second, "lr": 0.1, "betas": (0.5, 0.9)})
    with patch("fullshard.optim.quantised.averages._MOST", together):
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": late, "rounding": "residual", "eps": 0.1})
            params = first + second + (late if step > 1 else [])
            for number, param in enumerate(params):  # some have none, so steps differ
                param.grad = None
                if (number + step) % 5:
                    noise = torch.randn(param.shape, generator=generator)
                    param.grad = noise.to(param.dtype)
            optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values()]
    return [*first, *second, *late, *state]


def test_parameters_of_a_batch_are_stepped_as_each_alone_would_be() -> None:
    batched, alone = _mixed(1 << 16), _mixed(1)
    assert len(batched) == len(alone)
    for found, expected in zip(batched, alone, strict=True):
        assert torch.equal(found, expected)


def test_a_compiled_step_takes_its_tables_as_inputs_and_is_the_eager_one() -> None:
    """But for torch's own corrections of bias, which it computes in fp32 then."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph.code)
        return graph.forward

    ends = []
    for compiled in (False, True):
        weight = nn.Parameter(torch.randn(64, 300, generator=torch.Generator().manual_seed(4)))
        weight.grad = weight.detach().sin()
        optimizer = AdamW8bit([weight], lr=0.01)
        with patch("fullshard.optim.quantised.dynamic_map._TABLES", {}):
            step = torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step
            for _ in range(4):
                step()
        ends.append((weight.detach(), optimizer.state[weight]["exp_avg"]))
    assert "index_select" in graphs[-1] and "bucketize" not in graphs[-1]
    (eager, codes), (compiled_weight, compiled_codes) = ends
    assert torch.equal(codes, compiled_codes)
    torch.testing.assert_close(eager, compiled_weight, rtol=1e-4, atol=1e-5)


# -- the map, blocks and rounding -----------------------------------------------------------------


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_has_256_values_and_gives_each_its_own_code(signed: bool) -> None:
    values = tables_on(torch.device("cpu")).values[0 if signed else 1]
    assert values.shape == (256,) and bool((values.diff() > 0).all())
    assert values.max() == 1.0 and 0.0 in values
    assert values.min() == (pytest.approx(-0.99296875) if signed else 0.0)
    codes = torch.arange(256).to(torch.uint8)
    assert torch.equal(decoded(codes.expand(2, -1))[0 if signed else 1], values)
    assert torch.equal(encoded(values.expand(2, -1))[0 if signed else 1], codes)


@pytest.mark.parametrize("signed", [True, False])
def test_each_number_gets_the_nearest_value_to_the_rounding_of_bf16(signed: bool) -> None:
    numbers = torch.rand(20_000, generator=torch.Generator().manual_seed(1)) ** 4
    numbers = numbers * torch.tensor([1.0, -1.0]).repeat(10_000) if signed else numbers
    values = tables_on(torch.device("cpu")).values[0 if signed else 1]
    both = decoded(encoded(numbers.expand(2, -1)))
    found = (both[0 if signed else 1] - numbers).abs()
    nearest = (values - numbers.unsqueeze(1)).abs().amin(1)
    assert bool((found <= nearest + numbers.abs() * 2**-7 + 1e-7).all())


@pytest.mark.parametrize(
    "columns", [(0, 300), (100, 700), (256, 512), (10, 20), (250, 260), (5, 5)]
)
def test_a_shard_has_parts_of_the_blocks_of_whole_rows(columns: tuple[int, int]) -> None:
    whole = torch.randn(3, 700, generator=torch.Generator().manual_seed(2))
    low, high = columns
    part = whole[:, low:high].contiguous()
    blocks = Blocks(low, high)
    expected = [
        part[:, max(at, low) - low : min(at + 256, high) - low].abs().amax(1)
        for at in range(0, 700, 256)
        if max(at, low) < min(at + 256, high)
    ]
    scales = blocks.scales_of(part)
    assert scales.shape == (3, len(expected))
    if expected:
        assert torch.equal(scales, torch.stack(expected, 1))
    divided = part.clone()
    blocks.divide(divided, scales)
    back = decoded(encoded(divided.expand(2, -1, -1)))[0]
    blocks.multiply(back, scales)
    largest = part.abs().amax() if part.numel() else 0.0
    # half of what values are apart, and the rounding to bf16
    assert bool(((back - part).abs() <= (0.9 / 128 + 2**-8) * largest).all())


def test_stochastic_rounding_is_right_on_average_and_keeps_what_bf16_has() -> None:
    places = torch.arange(40_000)
    third = torch.full((40_000,), 1 + 2**-7 / 3)  # a third of the way to the next number of bf16
    rounded = rounded_to_bf16(third, places, 0, 1, 2)
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    up = (rounded > 1).float().mean().item()
    assert abs(up - 1 / 3) < 4 * (2 / 9 / 40_000) ** 0.5  # 4 standard deviations
    kept = torch.randn(1000).to(torch.bfloat16)
    assert torch.equal(rounded_to_bf16(kept.float(), places[:1000], 5), kept)
    odd = torch.tensor([float("inf"), -float("inf"), float("nan")])
    assert torch.equal(rounded_to_bf16(odd, places[:3], 5), odd.bfloat16()) or odd[2].isnan()


def test_steps_too_small_for_bf16_are_lost_by_rounding_to_the_nearest_only() -> None:
    moved = {}
    for rounding in ("stochastic", "residual", "nearest"):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = AdamW8bit([weight], lr=1e-4, weight_decay=0.0, rounding=rounding)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[rounding] = 1 - weight.detach().float().mean().item()
    assert moved["nearest"] == 0
    assert moved["residual"] == pytest.approx(0.01, rel=0.3)
    assert moved["stochastic"] == pytest.approx(0.01, rel=0.1)


def test_places_are_those_of_the_whole() -> None:
    whole = torch.arange(4 * 5 * 6).view(4, 5, 6)
    box = Box((1, 0, 2), (2, 5, 2))
    assert torch.equal(places_in(whole.shape, box, torch.device("cpu")), whole[1:3, :, 2:4])
