"""All-reduces of reduced shards over replicas: through memory, in rank order."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from fullshard.comm import (
    Layout,
    SharedMemoryTransport,
    TensorSpec,
    all_reduce_shards,
    default_reduce_scatter,
    foreach_reduce,
    reduction_scaling,
)
from fullshard.comm.collectives.replicas import AllReduceInFlight
from fullshard.comm.same_host.same_host import AutomaticTransport
from fullshard.comm.same_host.shared_group import shared_group
from fullshard.comm.transports.rank_order import reduce_in_rank_order
from support.apart import private_memory
from support.collectives import reduce_config
from support.ranks import cpu_mesh, distributed, new_group, world

SHARED = SharedMemoryTransport()
SUM = dist.ReduceOp.SUM
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def numbers_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of many sizes, whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    scale = torch.logspace(0, 3, numel) if numel > 1 else 1.0
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


def in_rank_order(numel: int, dtype: torch.dtype, op: Any, ranks: int) -> torch.Tensor:
    total = torch.zeros(numel, dtype=dtype)
    parts = [numbers_of(rank, numel, dtype) for rank in range(ranks)]
    reduce_in_rank_order(parts, total, op)
    return total


def launches_of_its_own(mode: CommDebugMode) -> int:
    counts: dict[object, int] = mode.get_comm_counts()
    return sum(counts.values())


# -- one all-reduce -------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@distributed(2, 4)
def test_ranks_that_share_memory_get_the_sum_in_rank_order(
    dtype: torch.dtype, asynchronous: bool, world_size: int
) -> None:
    for op in (SUM, dist.ReduceOp.MAX):
        for numel in (1, 1000, 200_000):  # of more than one block
            tensor = numbers_of(dist.get_rank(), numel, dtype)
            work = SHARED.all_reduce(tensor, op, world(), asynchronous)
            assert (work is not None) == asynchronous
            if work is not None:
                work.wait()
                work.wait()  # again: nothing
            assert torch.equal(tensor, in_rank_order(numel, dtype, op, world_size))


@distributed(2)
def test_what_cannot_be_reduced_is_refused_before_anything_is_sent() -> None:
    before = shared_group(world()).launched
    for wrong, message in (
        (torch.zeros(2, 3).t(), "contiguous CPU tensors"),
        (torch.zeros(2).bool(), r"sum of torch\.bool"),
    ):
        with pytest.raises(ValueError, match=message):
            SHARED.all_reduce(wrong, SUM, world(), False)
    with pytest.raises(ValueError, match="bor; it must be one of"):
        SHARED.all_reduce(torch.ones(1), dist.ReduceOp.BOR, world(), False)
    assert SHARED.all_reduce(torch.zeros(0), SUM, world(), True) is None
    assert shared_group(world()).launched == before


@distributed(2)
def test_the_default_shares_memory_unless_told_otherwise_and_knows_what_only_the_group_can() -> (
    None
):
    group, transport = new_group(), AutomaticTransport()
    for op, private, shared in (
        (SUM, False, True),
        (SUM, True, False),
        (dist.ReduceOp.BOR, False, False),
    ):
        bits = torch.tensor([1 + dist.get_rank()])
        here: AbstractContextManager[None] = private_memory() if private else nullcontext()
        before = shared_group(group).launched
        with here, CommDebugMode() as mode:
            transport.all_reduce(bits, op, group, False)
        assert bits.item() == 3
        assert shared_group(group).launched - before == shared
        assert launches_of_its_own(mode) == (not shared)
    dist.destroy_process_group(group)


# -- of reduced shards ----------------------------------------------------------------------------


class _Hybrid:
    """Reductions over a mesh of two replicas of two shards."""

    def __init__(self, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
        self.mesh = cpu_mesh((2, 2), ("replicate", "shard"))
        self.dtype = dtype
        self.scaling = reduction_scaling(4, dtype, averages=False)
        shards = self.mesh.get_group("shard")
        config = reduce_config(shards, default_reduce_scatter(shards), dtype=dtype)
        self.settings = replace(config, scaling=replace(self.scaling, post=1.0))
        specs = [TensorSpec(shape=shape, dtype=dtype) for shape in shapes]
        masks = sum(spec.numel > 0 for spec in specs)
        self.layout = Layout(specs, 2, mask_numel=masks)

    def given(self, rank: int, salt: int = 0) -> list[torch.Tensor]:
        return [
            numbers_of(100 * salt + 10 * number + rank, spec.numel, self.dtype).view(spec.shape)
            for number, spec in enumerate(self.layout.specs)
        ]

    def reduce(self, salt: int = 0, partial: torch.Tensor | None = None) -> list[torch.Tensor]:
        reduction = foreach_reduce(self.given(dist.get_rank(), salt), self.layout, self.settings)
        group = self.mesh.get_group("replicate")
        return all_reduce_shards(reduction, group, self.scaling, partial).wait().shards

    def wanted(self, salt: int = 0) -> list[torch.Tensor]:
        """Shards first, then replicas, each sum rounded to the dtype."""
        given = [self.given(rank, salt) for rank in range(4)]
        totals = []
        for parts in zip(*given, strict=True):
            scaled = [part * self.scaling.pre for part in parts]
            total = (scaled[0] + scaled[1]) + (scaled[2] + scaled[3])
            totals.append(total * self.scaling.post)
        return totals


def _shards_of(hybrid: _Hybrid, totals: list[torch.Tensor]) -> list[torch.Tensor]:
    rank, found = dist.get_rank() % 2, []
    for spec, total in zip(hybrid.layout.specs, totals, strict=True):
        first = spec.first_row(rank, 2)
        found.append(total.narrow(0, first, spec.shard_shape(rank, 2)[0]))
    return found


SHAPES: list[tuple[int, ...]] = [(7, 3), (4, 5000), (1,), (2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@distributed(4)
def test_replicas_get_the_sum_of_sums_to_the_last_bit(dtype: torch.dtype) -> None:
    hybrid = _Hybrid(dtype, SHAPES)
    with CommDebugMode() as mode:
        hybrid.reduce()
        before = launches_of_its_own(mode)
        for salt in range(3):
            got = hybrid.reduce(salt)
            for mine, wanted in zip(got, _shards_of(hybrid, hybrid.wanted(salt)), strict=True):
                assert torch.equal(mine, wanted)
    assert launches_of_its_own(mode) == before  # all of it went through memory


@distributed(4)
def test_partial_results_are_added_before_they_travel() -> None:
    hybrid = _Hybrid(torch.float32, SHAPES)
    earlier = foreach_reduce(
        hybrid.given(dist.get_rank(), 1), hybrid.layout, hybrid.settings
    ).wait()
    got = hybrid.reduce(0, earlier.output)
    one, other = hybrid.wanted(0), hybrid.wanted(1)
    sums = [a + b for a, b in zip(one, other, strict=True)]
    for mine, wanted in zip(got, _shards_of(hybrid, sums), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-3)
    everyones = [torch.empty_like(each) for each in got]
    for mine, theirs in zip(got, everyones, strict=True):
        theirs.copy_(mine)
        dist.broadcast(theirs, dist.get_rank() % 2, group=hybrid.mesh.get_group("replicate"))
        assert torch.equal(mine, theirs)


@distributed(4)
def test_nothing_is_sent_of_nothing() -> None:
    hybrid = _Hybrid(torch.float32, [(0, 3)])
    group = hybrid.mesh.get_group("replicate")
    SHARED.all_reduce(torch.ones(1), SUM, group, False)
    before = shared_group(group).launched
    assert [each.shape for each in hybrid.reduce()] == [(0, 3)]
    assert shared_group(group).launched == before


@pytest.mark.parametrize("sizes", [(4, 40_000, 400_000, 1_200_000)], ids=str)
@distributed(4)
def test_ranks_whose_memory_must_grow_in_between_do_not_wait_for_each_other_in_a_ring(
    sizes: tuple[int, ...],
) -> None:
    """Shard 1 lands late in replica 0, shard 0 in replica 1; see [Note: order of all-reduces]."""
    hybrids = [_Hybrid(torch.float32, [(size,)]) for size in sizes]
    flying: list[AllReduceInFlight] = []
    for hybrid in hybrids:
        for each in flying[-1:]:
            each.finish()
        given = hybrid.given(dist.get_rank())
        reduction = foreach_reduce(given, hybrid.layout, hybrid.settings)
        group = hybrid.mesh.get_group("replicate")
        flying.append(all_reduce_shards(reduction, group, hybrid.scaling))
    for hybrid, each in zip(hybrids, flying, strict=True):
        for mine, wanted in zip(
            each.wait().shards, _shards_of(hybrid, hybrid.wanted()), strict=True
        ):
            assert torch.equal(mine, wanted)
