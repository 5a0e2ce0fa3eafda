"""Reductions of uneven lists among 128 ranks, which are threads: each rank ends with its mean.

Two oracles. A plain all-reduce over the same ranks adds in the same order, so it must agree bit for
bit. The fp64 mean of all ranks' gradients, worked out outside of any collective, must lie within
the rounding errors of N additions.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import (
    CommStreams,
    Layout,
    ReducedShards,
    ReduceScaling,
    TensorSpec,
    foreach_reduce,
    reduction_scaling,
)
from support.collectives import reduce_config
from support.products import few
from support.threads.group import ThreadGroup
from support.threads.ranks import ThreadRank, run_on_threads
from support.wide.tensors import (
    BlockingStreams,
    OneStream,
    full_tensors,
    mean_and_bound,
    shard_of,
    specs_of,
)

WORLD = 128
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _reduce(
    gradients: Sequence[torch.Tensor | None],
    layout: Layout,
    group: ThreadGroup,
    scaling: ReduceScaling,
    streams: type[CommStreams] = CommStreams,
) -> ReducedShards:
    config = reduce_config(group, scaling=scaling, streams=streams(CPU))
    return foreach_reduce(gradients, layout, config).wait()


def _all_reduced(
    gradient: torch.Tensor, group: ThreadGroup, scaling: ReduceScaling
) -> torch.Tensor:
    total = gradient * scaling.pre
    dist.all_reduce(total, scaling.op, group=group)
    return total * scaling.post


def _check(
    results: Sequence[ReducedShards],
    specs: Sequence[TensorSpec],
    everyones: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Compare ``results[rank]`` with the fp64 mean over ``everyones[rank][tensor]``."""
    for index, spec in enumerate(specs):
        mean, bound = mean_and_bound([each[index] for each in everyones], spec.dtype)
        for rank, reduced in enumerate(results):
            shard = reduced.shards[index]
            assert shard.dtype is spec.dtype
            off = (shard.double() - shard_of(mean, spec.dim, rank, WORLD)).abs()
            assert bool((off <= shard_of(bound, spec.dim, rank, WORLD)).all())


@pytest.mark.parametrize("dtype", few(DTYPES, torch.float32))
@pytest.mark.parametrize(
    ("streams", "averages"),
    few(
        [(CommStreams, False), (BlockingStreams, False), (OneStream, False), (CommStreams, True)],
        (CommStreams, False),
        (OneStream, False),
        together=True,
    ),
    ids=["async", "sync", "one-stream", "average"],
)
def test_128_ranks_reduce_uneven_gradients_to_the_mean(
    dtype: torch.dtype, streams: type[CommStreams], averages: bool
) -> None:
    specs = specs_of((dtype,))
    layout = Layout(specs, WORLD, mask_numel=len(specs))
    everyones = [full_tensors(specs, rank) for rank in range(WORLD)]
    scaling = reduction_scaling(WORLD, dtype, averages=averages)

    def body(rank: ThreadRank) -> ReducedShards:
        gradients = everyones[rank.rank]
        reduced = _reduce(gradients, layout, rank.group, scaling, streams)
        assert reduced.mask is not None and bool((reduced.mask >= 1).all())
        for shard, spec, gradient in zip(reduced.shards, specs, gradients, strict=True):
            expected = _all_reduced(gradient, rank.group, scaling)
            assert torch.equal(shard, shard_of(expected, spec.dim, rank.rank, WORLD))
        return reduced

    _check(run_on_threads(body, WORLD), specs, everyones)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_one_of_128_ranks_has_is_known_to_all(dtype: torch.dtype) -> None:
    specs = [TensorSpec(shape=(130, 2), dtype=dtype)] * 4
    layout = Layout(specs, WORLD, mask_numel=len(specs))
    everyones = [full_tensors(specs, rank) for rank in range(WORLD)]
    holders = [set(range(WORLD)), {77}, set(), set(range(0, WORLD, 3))]
    scaling = reduction_scaling(WORLD, dtype, averages=False)
    held = [
        [
            each if rank in who else torch.zeros_like(each)
            for each, who in zip(own, holders, strict=True)
        ]
        for rank, own in enumerate(everyones)
    ]

    def body(rank: ThreadRank) -> ReducedShards:
        own = zip(everyones[rank.rank], holders, strict=True)
        gradients = [each if rank.rank in who else None for each, who in own]
        reduced = _reduce(gradients, layout, rank.group, scaling)
        assert reduced.mask is not None
        assert (reduced.mask > 0).tolist() == [True, True, False, True]
        return reduced

    _check(run_on_threads(body, WORLD), specs, held)
