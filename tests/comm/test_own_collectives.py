"""The collectives of ``docs/how-to/own-collective.md``, as they stand there, on comm alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import DefaultAllGather, DefaultReduceScatter, TensorSpec
from fullshard.comm.runtime.required import require
from fullshard.comm.transports.collective import AllGather, ReduceScatter
from support.ranks import distributed, world
from support.threads.ranks import ThreadRank, run_on_threads
from support.wide.page import OWN_COLLECTIVE, run_page

SPECS = [
    TensorSpec(shape=(5, 3), dtype=torch.float32),
    TensorSpec(shape=(1,), dtype=torch.float32),
    TensorSpec(shape=(2, 6), dtype=torch.float32, dim=1),
]
# What one rank sends of SPECS: 36 + 4 + 24 and 24 + 4 + 16 bytes, rounded up to 16.
SLICE_BYTES = {2: 64, 4: 48}
LAST_BITS = 2**-20  # a few additions in fp32


def _page() -> dict[str, Any]:
    """What the page defines without the layers above."""
    return run_page(OWN_COLLECTIVE, leave_out=("Plug them into `fully_shard`",))


def _cut(full: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """This rank's part by ``torch.chunk``."""
    parts = full.chunk(dist.get_world_size(), spec.dim)
    empty = full.narrow(spec.dim, 0, 0)
    return parts[dist.get_rank()].contiguous() if dist.get_rank() < len(parts) else empty


def _gradients() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """This rank's gradients, and those of all ranks."""
    everyones = [
        [torch.randn(spec.shape, generator=torch.Generator().manual_seed(rank)) for spec in SPECS]
        for rank in range(dist.get_world_size())
    ]
    return everyones[dist.get_rank()], everyones


def test_the_pages_classes_are_accepted_as_collectives() -> None:
    defined = _classes_only()
    for name in ("CountingAllGather", "ListAllGather"):
        require(AllGather, defined[name]())
    for name in ("HalfTrafficReduceScatter", "AllReduceScatter"):
        require(ReduceScatter, defined[name]())


def _classes_only() -> dict[str, Any]:
    uses = (
        "Plug them into `fully_shard`",
        "Or use them without it",
        "Replace one choice of two",
    )
    return run_page(OWN_COLLECTIVE, leave_out=uses)


@distributed(2, 4)
def test_the_page_runs_and_gives_means() -> None:
    defined = _page()
    for mean, gradient in zip(defined["means"], defined["gradients"], strict=True):
        # Ranks draw the same numbers here, so the mean is the gradient: rounded once to bf16.
        torch.testing.assert_close(mean, gradient, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", ["CountingAllGather", "ListAllGather"])
@distributed(2, 4)
def test_an_all_gather_of_ones_own_gathers_what_the_default_does(
    name: str, world_size: int
) -> None:
    defined = _page()
    mixed = [*SPECS, TensorSpec(shape=(7,), dtype=torch.bfloat16)]
    for specs in (SPECS, mixed):
        full = [torch.randn(spec.shape).to(spec.dtype) for spec in specs]
        shards = [_cut(each, spec) for each, spec in zip(full, specs, strict=True)]
        own = defined["gather"](shards, specs, defined[name](), world())
        default = defined["gather"](shards, specs, DefaultAllGather(), world())
        for mine, theirs, each in zip(own, default, full, strict=True):
            assert torch.equal(mine, theirs)
            assert torch.equal(mine, each)


@distributed(2, 4)
def test_the_counter_counts_what_the_other_ranks_sent(world_size: int) -> None:
    defined = _page()
    counter = defined["CountingAllGather"]()
    shards = [_cut(torch.zeros(spec.shape), spec) for spec in SPECS]
    for calls in (1, 2):
        defined["gather"](shards, SPECS, counter, world())
        assert counter.received == calls * (world_size - 1) * SLICE_BYTES[world_size]


@distributed(2, 4)
def test_bf16_over_all_to_all_stays_within_the_tolerance_that_the_page_states(
    world_size: int,
) -> None:
    defined = _page()
    gradients, everyones = _gradients()
    own = defined["reduce_to_mean"](
        gradients, SPECS, defined["HalfTrafficReduceScatter"](), world()
    )
    default = defined["reduce_to_mean"](gradients, SPECS, DefaultReduceScatter(), world())
    rounded = False
    for index, spec in enumerate(SPECS):
        stack = torch.stack([each[index].double() for each in everyones])
        magnitude = _cut(stack.abs().mean(0), spec)
        off = (own[index] - default[index]).abs()
        assert bool((off <= (2**-8 + LAST_BITS) * magnitude).all())
        exact = _cut(stack.mean(0), spec)
        assert bool(((own[index] - exact).abs() <= (2**-8 + LAST_BITS) * magnitude).all())
        rounded = rounded or bool(off.any())
    some = torch.tensor(float(rounded))
    dist.all_reduce(some)
    assert some.item() > 0, "nothing was rounded, so it was not bf16 that travelled"


def test_bf16_over_all_to_all_still_counts_where_a_sum_in_bf16_stops() -> None:
    """128 ranks: 256 and 127 times 1. Added in bf16, 256 + 1 is 256."""
    world_size = 128
    defined = _classes_only()

    def body(rank: ThreadRank, comm: Any) -> float:
        given = torch.full((world_size,), 256.0 if rank.rank == 0 else 1.0)
        output = torch.empty(1)
        comm(output, given, rank.group, dist.ReduceOp.SUM)
        return output.item()

    own = defined["HalfTrafficReduceScatter"]()
    assert set(run_on_threads(body, world_size, own)) == {256.0 + 127.0}


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@distributed(2)
def test_bf16_over_all_to_all_knows_sum_from_average(op: str, world_size: int) -> None:
    output = torch.empty(1)
    given = torch.tensor([1.0, 2.0]) * (1 + 2 * dist.get_rank())
    _page()["HalfTrafficReduceScatter"]()(output, given, world(), getattr(dist.ReduceOp, op))
    total = (dist.get_rank() + 1) * 4.0
    assert output.item() == (total if op == "SUM" else total / world_size)


@distributed(2, 4)
def test_a_reduction_written_for_torch_reduces_what_the_default_does(world_size: int) -> None:
    defined = _page()
    gradients, everyones = _gradients()
    own = defined["reduce_to_mean"](gradients, SPECS, defined["AllReduceScatter"](), world())
    default = defined["reduce_to_mean"](gradients, SPECS, DefaultReduceScatter(), world())
    for index, spec in enumerate(SPECS):
        magnitude = _cut(torch.stack([each[index].abs() for each in everyones]).mean(0), spec)
        # The order of N additions may differ: N - 1 roundings on either side.
        tolerance = 2 * (world_size - 1) * torch.finfo(torch.float32).eps / 2 * magnitude
        assert bool(((own[index] - default[index]).abs() <= tolerance).all())
