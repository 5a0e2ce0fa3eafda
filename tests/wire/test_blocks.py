"""Blocks of 8 bits: how far off numbers are, where blocks lie, and what gathers make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.comm import (
    DefaultAllGather,
    Layout,
    TensorSpec,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from fullshard.wire import Quantised
from fullshard.wire.blocks import BlockSpec, in_blocks
from support.collectives import gather_config, shard_of
from support.threads.ranks import ThreadRank, run_on_threads

INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
STEPS = {INT8: 254.0, E4M3: 28.0, E5M2: 14.0}  # a number is off by the block's largest over these

quantised = st.builds(Quantised, st.sampled_from(sorted(STEPS, key=str)), st.just(16))
wide_shapes = st.sampled_from(
    [((5, 33), 0), ((5, 70), 1), ((100,), 0), ((3, 4, 20), 1), ((2, 3, 48), 2), ((64, 16), 0)]
)


def arrived_whole(
    full: torch.Tensor, spec: TensorSpec, form: TensorSpec, ranks: int
) -> torch.Tensor:
    shards = [form.rounded(shard_of(full, spec, r, ranks), r) for r in range(ranks)]
    return torch.cat(shards, spec.dim)


def blocks_of(shard: torch.Tensor, spec: TensorSpec, rank: int, ranks: int, size: int) -> Any:
    """The blocks of a shard as index ranges of its last dim, by the definition."""
    last = len(spec.laid_shape) - 1
    first = spec.first_row(rank, ranks) if spec.dim == last else 0
    columns = range(shard.shape[-1])
    numbers = [(first + column) // size for column in columns]
    return [
        [column for column in columns if numbers[column] == number]
        for number in dict.fromkeys(numbers)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("coded", [INT8, E4M3, E5M2], ids=str)
def test_numbers_are_torchs_cast_of_every_code_times_the_scale(
    coded: torch.dtype, dtype: torch.dtype
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(coded)
    codes = codes[codes.float().isfinite()].unsqueeze(0)
    for scale in (1.0, 0.37, 2.0**-20, torch.nan):
        scales, found = torch.tensor([scale]), torch.empty(codes.shape, dtype=dtype)
        Quantised(coded).decode(codes, scales, found)
        wanted = codes.to(dtype).mul_(scales.unsqueeze(-1))
        assert torch.equal(found.nan_to_num(nan=1e4), wanted.nan_to_num(nan=1e4))


def drawn(spec: TensorSpec, seed: int) -> torch.Tensor:
    """Numbers of very different sizes in one tensor, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 4, spec.shape, generator=generator)
    zeros = torch.rand(spec.shape, generator=generator) < 0.2
    return (torch.randn(spec.shape, generator=generator) * sizes).masked_fill(zeros, 0.0)


@settings(max_examples=80, deadline=None)
@given(wide_shapes, quantised, st.integers(1, 5), st.integers(0, 999))
def test_a_number_is_off_by_half_a_step_of_its_block_and_arrives_the_same_when_sent_again(
    shape: tuple[tuple[int, ...], int], form: Quantised, ranks: int, seed: int
) -> None:
    spec = TensorSpec(shape=shape[0], dtype=torch.float32, dim=shape[1])
    coded, full = in_blocks(spec, form, ranks), drawn(spec, seed)
    assert isinstance(coded, BlockSpec) or ranks > 3
    for rank in range(ranks):
        shard = shard_of(full, spec, rank, ranks).contiguous()
        arrived = coded.rounded(shard, rank)
        assert arrived.shape == shard.shape
        for block in blocks_of(shard, spec, rank, ranks, form.block):
            exact, got = shard[..., block].double(), arrived[..., block].double()
            bound = exact.abs().amax(-1, keepdim=True) / STEPS[form.dtype] * (1 + 1e-3)
            assert bool(((exact - got).abs() <= bound + 1e-37).all())
        assert torch.equal(coded.rounded(arrived, rank), arrived)


@pytest.mark.parametrize("dtype", sorted(STEPS, key=str))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_infinity_or_no_number_arrives_as_none_and_its_neighbours_whole(
    dtype: torch.dtype, bad: float
) -> None:
    spec = TensorSpec(shape=(3, 40), dtype=torch.float32)
    coded, full = in_blocks(spec, Quantised(dtype, 16), 1), drawn(spec, 0)
    fine = coded.rounded(full, 0)
    full[1, 20] = bad
    arrived = coded.rounded(full, 0)
    assert arrived[1, 16:32].isnan().all()
    arrived[1, 16:32] = fine[1, 16:32]
    assert torch.equal(arrived, fine)


@pytest.mark.parametrize("dtype", sorted(STEPS, key=str))
def test_the_largest_and_the_smallest_numbers_stay_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(torch.float32).max
    spec = TensorSpec(shape=(4, 16), dtype=torch.float32)
    rows = [[largest, -largest], [0.0, -0.0], [1e-38, -1e-39], [1e-45, 0.0]]
    full = torch.tensor([row * 8 for row in rows])
    arrived = in_blocks(spec, Quantised(dtype, 16), 1).rounded(full, 0)
    assert arrived.isfinite().all()
    torch.testing.assert_close(arrived[0], full[0], rtol=1e-4, atol=0.0)
    torch.testing.assert_close(arrived[1:], full[1:], rtol=0.0, atol=1.2e-38)


def test_cuts_between_blocks_change_nothing_and_so_no_number_of_ranks_does() -> None:
    form = Quantised(INT8, 16)
    for shape, dim in (((12, 33), 0), ((5, 96), 1)):
        spec = TensorSpec(shape=shape, dtype=torch.float32, dim=dim)
        full = drawn(spec, 0)
        whole = in_blocks(spec, form, 1).rounded(full, 0)
        for ranks in (2, 3, 6):
            assert torch.equal(
                arrived_whole(full, spec, in_blocks(spec, form, ranks), ranks), whole
            )


def test_what_takes_no_fewer_bytes_travels_as_it_is() -> None:
    form = Quantised(INT8)
    for spec in (
        TensorSpec(shape=(100, 1), dtype=torch.float32),
        TensorSpec(shape=(), dtype=torch.float32),
        TensorSpec(shape=(0, 64), dtype=torch.float32),
        TensorSpec(shape=(100, 3), dtype=torch.bfloat16),
        TensorSpec(shape=(64, 64), dtype=torch.int64),
        TensorSpec(shape=(64, 64), dtype=E4M3),
    ):
        assert in_blocks(spec, form, 2) is spec
    matrix = TensorSpec(shape=(1024, 1024), dtype=torch.float32)
    coded = in_blocks(matrix, form, 4)
    assert coded.shape == (4, 256 * 1024 // 4 + 256 * 4)  # a byte each, and four scales a row
    assert coded.form == "torch.int8 in blocks of 256"
    tall = in_blocks(TensorSpec(shape=(3, 512), dtype=torch.float32), form, 8)
    assert tall.shape[0] == 3  # ranks that hold nothing send nothing


everything = st.sampled_from(
    [
        (TensorSpec(shape=(5, 33), dtype=torch.float32), INT8),
        (TensorSpec(shape=(6, 70), dtype=torch.float32, dim=1), E4M3),
        (TensorSpec(shape=(40,), dtype=torch.float32), E5M2),
        (TensorSpec(shape=(3, 5, 32), dtype=torch.bfloat16, dim=1), INT8),
        (TensorSpec(shape=(7, 3), dtype=torch.float32), None),
        (TensorSpec(shape=(), dtype=torch.float32), None),
        (TensorSpec(shape=(0, 3), dtype=torch.float32), INT8),
        (TensorSpec(shape=(5, 4), dtype=torch.int64), INT8),
        (TensorSpec(shape=(2, 16), dtype=torch.float32), INT8),
    ]
)


@settings(max_examples=40, deadline=None)
@given(st.lists(everything, min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 999))
def test_every_rank_gathers_what_became_of_each_shard_beside_what_travels_as_it_is(
    drawn_specs: list[tuple[TensorSpec, torch.dtype | None]], ranks: int, seed: int
) -> None:
    forms = [
        spec if dtype is None else in_blocks(spec, Quantised(dtype, 16), ranks)
        for spec, dtype in drawn_specs
    ]
    specs = [spec for spec, _ in drawn_specs]
    fulls = [drawn(spec, seed + place).to(spec.dtype) for place, spec in enumerate(specs)]
    layout = Layout(forms, ranks)

    def body(rank: ThreadRank) -> Sequence[torch.Tensor]:
        config = gather_config(rank.group, DefaultAllGather())
        pairs = zip(fulls, specs, strict=True)
        shards = [shard_of(full, spec, rank.rank, ranks) for full, spec in pairs]
        outputs = [torch.empty_like(full) for full in fulls]
        for _ in range(2):
            foreach_all_gather_copy_out(foreach_all_gather(shards, layout, config), outputs)
        return outputs

    every = zip(fulls, specs, forms, strict=True)
    wanted = [arrived_whole(full, spec, form, ranks) for full, spec, form in every]
    for outputs in run_on_threads(body, ranks):
        for output, expected in zip(outputs, wanted, strict=True):
            assert torch.equal(output, expected.view(output.shape))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.int16,), ValueError, r"dtype torch\.int16; pass torch\.int8, torch\.float8_e4m3fn"),
        (("int8",), TypeError, r"dtype 'int8'; pass one such as torch\.int8"),
        ((INT8, 100), ValueError, r"a block of 100 numbers, which does not fit; .* 16 to 4096"),
        ((INT8, 8192), ValueError, r"a block of 8192 numbers"),
        ((INT8, 0), ValueError, r"a block of 0 numbers"),
        ((INT8, 64.0), TypeError, r"a block of 64\.0; pass an int such as 256"),
        ((INT8, 64, -1), ValueError, r"the seed -1; pass an int from 0 on, or None"),
    ],
)
def test_a_wrong_dtype_or_block_is_an_error_that_says_what_fits(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Quantised(*arguments)


@settings(max_examples=40, deadline=None)
@given(wide_shapes, st.sampled_from(sorted(STEPS, key=str)), st.integers(1, 4), st.integers(0, 99))
def test_by_draws_a_number_becomes_one_of_its_neighbours_and_itself_if_it_is_a_code(
    shape: tuple[tuple[int, ...], int], dtype: torch.dtype, ranks: int, seed: int
) -> None:
    spec = TensorSpec(shape=shape[0], dtype=torch.float32, dim=shape[1])
    coded = in_blocks(spec, Quantised(dtype, 16, seed=seed), ranks, "weight")
    if not isinstance(coded, BlockSpec):
        return
    full, before = drawn(spec, seed), torch.get_rng_state()
    for rank in range(ranks):
        shard = shard_of(full, spec, rank, ranks).contiguous()
        arrived = sent_by_draws(shard, coded, rank, keys=(seed, 1, 2, 3))
        for block in blocks_of(shard, spec, rank, ranks, 16):
            exact, got = shard[..., block].double(), arrived[..., block].double()
            step = exact.abs().amax(-1, keepdim=True) / STEPS[dtype] * 2 * (1 + 1e-3)
            assert bool(((exact - got).abs() <= step + 1e-37).all())
        assert torch.equal(sent_by_draws(shard, coded, rank, keys=(seed, 1, 2, 3)), arrived)
        nearest = coded.rounded(shard, rank)
        assert torch.equal(sent_by_draws(nearest, coded, rank, keys=(0, 0, 0, 0)), nearest)
    assert torch.equal(torch.get_rng_state(), before)


def sent_by_draws(
    shard: torch.Tensor, coded: BlockSpec, rank: int, keys: tuple[int, ...]
) -> torch.Tensor:
    codes = torch.empty(1, coded.row_numel, dtype=coded.dtype)
    arrived = torch.empty_like(shard)
    coded.encode(shard.unsqueeze(0), codes, rank, keys)
    coded.decode(codes, arrived.unsqueeze(0), rank)
    return arrived


@pytest.mark.parametrize("dtype", sorted(STEPS, key=str))
def test_draws_are_right_on_average_and_differ_by_step_and_rank(dtype: torch.dtype) -> None:
    spec = TensorSpec(shape=(8, 64), dtype=torch.float32)
    coded = in_blocks(spec, Quantised(dtype, 16, seed=5), 1, "weight")
    assert isinstance(coded, BlockSpec)
    full = torch.rand(8, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    every = [sent_by_draws(full, coded, 0, coded.keys(0)) for _ in range(400)]
    assert not torch.equal(every[0], every[1])
    assert not torch.equal(
        sent_by_draws(full, coded, 0, (5, 0, 0, 0)), sent_by_draws(full, coded, 0, (5, 0, 0, 1))
    )
    step = 1.5 / STEPS[dtype] * 2
    off = (torch.stack(every).double().mean(0) - full.double()).abs().max().item()
    assert off < 5 * step / 2 / 400**0.5  # five deviations of a mean


def test_an_element_draws_the_same_in_any_cut_between_blocks_and_in_any_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = Quantised(INT8, 16, seed=1)
    for shape, dim in (((12, 33), 0), ((5, 96), 1), ((3, 6, 32), 1)):
        spec = TensorSpec(shape=shape, dtype=torch.float32, dim=dim)
        full, found = drawn(spec, 0), []
        for ranks, most in ((1, 1 << 16), (3, 1 << 16), (2, 32)):
            monkeypatch.setattr("fullshard.wire.blocks._TILE", most)
            coded = in_blocks(spec, form, ranks, "weight")
            assert isinstance(coded, BlockSpec)
            shards = [shard_of(full, spec, rank, ranks).contiguous() for rank in range(ranks)]
            each = [sent_by_draws(s, coded, r, (1, 2, 3, 4)) for r, s in enumerate(shards)]
            found.append(torch.cat(each, dim))
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
