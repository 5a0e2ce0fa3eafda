"""Reductions whose parts travel narrow: the sum of what was sent, added wide, whatever is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.comm import (
    DefaultReduceScatter,
    EventKind,
    EventLog,
    Layout,
    ReduceConfig,
    ReduceScaling,
    TensorSpec,
    observe,
    reduction_scaling,
)
from fullshard.samehost import AllToAllTransport
from fullshard.wire import Quantised, WidenedReducePlan
from fullshard.wire.blocks import in_blocks
from fullshard.wire.reduction import add_widened
from support.collectives import Allocates, drawn_gradients, reduce_config, shard_of
from support.ranks import distributed, world
from support.threads.ranks import ThreadRank, run_on_threads

FORMS = (torch.float32, torch.bfloat16, torch.float16)
IN_BLOCKS = tuple(
    Quantised(dtype, 16) for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
)

shapes = st.sampled_from(
    [((5, 3), 0), ((), 0), ((3, 7), 1), ((2, 9, 4), 1), ((0, 3), 0), ((70,), 0), ((3, 40), 1)]
)


def config_of(group: Any, comm: Any = None, scaling: ReduceScaling | None = None) -> ReduceConfig:
    comm = DefaultReduceScatter(transport=AllToAllTransport()) if comm is None else comm
    return reduce_config(group, comm, scaling)


def defined(
    gradients: Sequence[Sequence[torch.Tensor | None]], index: int, form: TensorSpec, rank: int
) -> torch.Tensor:
    """A shard of the mean of what each rank has, as it arrives, added in fp32 in rank order."""
    spec, ranks = form.arrives_as, len(gradients)
    total = torch.zeros(spec.shard_shape(rank, ranks))
    for place, of_rank in enumerate(gradients):
        gradient = of_rank[index]
        part = torch.zeros(spec.shape) if gradient is None else gradient
        arrived = form.rounded(shard_of(part, spec, rank, ranks), rank).float()
        total = arrived if place == 0 else total + arrived
    return total * (1 / ranks)


def sent_as(spec: TensorSpec, form: Any, ranks: int) -> TensorSpec:
    narrow = isinstance(form, torch.dtype)
    return replace(spec, dtype=form) if narrow else in_blocks(spec, form, ranks)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(FORMS + IN_BLOCKS)), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(0, 999),
)
def test_each_rank_gets_the_wide_sum_of_narrow_parts_and_the_mask_to_the_last_bit(
    drawn: list[tuple[tuple[tuple[int, ...], int], Any]], world_size: int, seed: int
) -> None:
    specs = [TensorSpec(shape=shape, dtype=torch.float32, dim=dim) for (shape, dim), _ in drawn]
    forms = [sent_as(spec, form, world_size) for spec, (_, form) in zip(specs, drawn, strict=True)]
    layout = Layout(specs, world_size, mask_numel=len(specs))
    everyones = [drawn_gradients(rank, specs, seed) for rank in range(world_size)]

    def body(rank: ThreadRank) -> tuple[list[torch.Tensor], torch.Tensor]:
        plan = WidenedReducePlan(layout, forms, config_of(rank.group))
        reduced = plan.launch(list(everyones[rank.rank])).wait()
        assert reduced.mask is not None
        return reduced.shards, reduced.mask

    for rank, (shards, mask) in enumerate(run_on_threads(body, world_size)):
        for index, form in enumerate(forms):
            wanted = defined(everyones, index, form, rank)
            assert shards[index].dtype is torch.float32
            assert torch.equal(shards[index], wanted)
            used = any(of_rank[index] is not None for of_rank in everyones)
            assert bool(mask[index] > 0) is used


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 200_000), st.integers(1, 6), st.sampled_from(FORMS), st.integers(0, 99))
def test_a_sum_is_off_by_half_a_unit_of_each_part_at_most(
    numel: int, parts: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    exact = [torch.randn(numel, generator=generator) for _ in range(parts)]
    output = torch.empty(numel)
    add_widened([each.to(dtype) for each in exact], output)
    sizes = torch.stack(exact).abs().double().sum(0)
    eps = torch.finfo(dtype).eps / 2 if dtype is not torch.float32 else 0.0
    bound = sizes * (eps + parts * torch.finfo(torch.float32).eps) + parts * 2.0**-25
    assert bool(((output.double() - torch.stack(exact).double().sum(0)).abs() <= bound).all())


@distributed(2)
def test_what_a_sum_in_bf16_loses_arrives() -> None:
    group = world()
    spec = TensorSpec(shape=(2000,), dtype=torch.float32)
    layout = Layout([spec], 2, mask_numel=1)
    scaling = reduction_scaling(2, torch.float32, averages=False, divide_factor=1.0)
    plan = WidenedReducePlan(
        layout, [replace(spec, dtype=torch.bfloat16)], config_of(group, scaling=scaling)
    )
    given = torch.full((2000,), 256.0 if group.rank() == 0 else 1.0)
    log = EventLog()
    with observe(log):
        (shard,) = plan.launch([given]).wait().shards
    assert shard.eq(257.0).all()  # bf16 has no 257
    (event,) = log.of(EventKind.REDUCE_SCATTER)
    assert event.nbytes == 2 * (1000 * 2 + 16)  # a slice: its numbers in bf16, and the mask


@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_an_average_is_computed_where_parts_are_added_so_that_every_backend_has_one(
    op: str,
) -> None:
    spec = TensorSpec(shape=(4, 2), dtype=torch.float32)
    layout = Layout([spec], 4, mask_numel=1)
    scaling = ReduceScaling(op=getattr(dist.ReduceOp, op), pre=1.0, post=1.0, used=4.0)

    def body(rank: ThreadRank) -> tuple[float, float]:
        config = config_of(rank.group, scaling=scaling)
        plan = WidenedReducePlan(layout, [replace(spec, dtype=torch.bfloat16)], config)
        given = torch.full((4, 2), float(rank.rank)) if rank.rank else None
        reduced = plan.launch([given]).wait()
        assert reduced.mask is not None
        return reduced.shards[0].mean().item(), reduced.mask.item()

    expected = (6.0, 12.0) if op == "SUM" else (1.5, 3.0)
    assert run_on_threads(body, 4) == [expected] * 4


class _Own(Allocates):
    def __call__(self, *args: Any, **options: Any) -> None:
        """Nothing."""


@distributed(1)
def test_what_cannot_be_reduced_so_is_refused_by_the_groups_name() -> None:
    group = world()
    spec = TensorSpec(shape=(4,), dtype=torch.float32)
    layout, narrow = Layout([spec], 1), replace(spec, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"blocks\.0: .* _Own is a reduce-scatter of your own"):
        WidenedReducePlan(layout, [narrow], config_of(group, comm=_Own()))
    with pytest.raises(ValueError, match=r"blocks\.0: got forms .* of the same shape and dim"):
        WidenedReducePlan(layout, [replace(narrow, shape=(3,))], config_of(group))
    product = ReduceScaling(op=dist.ReduceOp.PRODUCT, pre=1.0, post=1.0, used=1.0)
    with pytest.raises(ValueError, match=r"blocks\.0: got the reduction product; .* is summed"):
        WidenedReducePlan(layout, [narrow], config_of(group, scaling=product))
