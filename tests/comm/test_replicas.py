"""All-reduces of reduced shards over replicas: through memory, in rank order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from fullshard.comm import (
    Layout,
    TensorSpec,
    all_reduce_shards,
    default_reduce_scatter,
    foreach_reduce,
    reduction_scaling,
)
from fullshard.comm.collectives.replicas import AllReduceInFlight
from fullshard.samehost import SharedMemoryTransport
from fullshard.samehost.group import shared_group
from support.collectives import reduce_config
from support.ranks import cpu_mesh, distributed

SHARED = SharedMemoryTransport()
SUM = dist.ReduceOp.SUM


def numbers_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of many sizes, whose sum depends on the order in which they are added."""
    generator = torch.Generator().manual_seed(rank)
    scale = torch.logspace(0, 3, numel) if numel > 1 else 1.0
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


def launches_of_its_own(mode: CommDebugMode) -> int:
    counts: dict[object, int] = mode.get_comm_counts()
    return sum(counts.values())


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
            each.launch_second()
        given = hybrid.given(dist.get_rank())
        reduction = foreach_reduce(given, hybrid.layout, hybrid.settings)
        group = hybrid.mesh.get_group("replicate")
        flying.append(all_reduce_shards(reduction, group, hybrid.scaling))
    for hybrid, each in zip(hybrids, flying, strict=True):
        for mine, wanted in zip(
            each.wait().shards, _shards_of(hybrid, hybrid.wanted()), strict=True
        ):
            assert torch.equal(mine, wanted)
