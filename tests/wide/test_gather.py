"""Gathers of uneven lists among 128 ranks, which are threads: every rank ends with every tensor."""

from __future__ import annotations

import pytest
import torch

from fullshard.comm import (
    CommStreams,
    Layout,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from support.collectives import gather_config
from support.products import few
from support.threads.ranks import ThreadRank, run_on_threads
from support.wide.tensors import (
    MIXED,
    BlockingStreams,
    OneStream,
    full_tensors,
    shards_of,
    specs_of,
)

WORLD = 128
CPU = torch.device("cpu")
DTYPES = {
    "fp32": (torch.float32,),
    "fp16": (torch.float16,),
    "bf16": (torch.bfloat16,),
    "mixed": MIXED,
}


@pytest.mark.cross
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "streams", few([CommStreams, BlockingStreams, OneStream], CommStreams, BlockingStreams)
)
def test_128_ranks_gather_uneven_tensors_bit_for_bit(
    dtypes: tuple[torch.dtype, ...], async_op: bool, streams: type[CommStreams]
) -> None:
    specs = specs_of(dtypes)
    layout = Layout(specs, WORLD)
    full = full_tensors(specs)

    def body(rank: ThreadRank) -> None:
        config = gather_config(rank.group, streams=streams(CPU))
        shards = shards_of(full, specs, rank.rank, WORLD)
        in_flight = foreach_all_gather(shards, layout, config, async_op=async_op)
        assert (in_flight.work is not None) == (async_op or config.streams.asynchronous_work)
        outputs = [torch.full_like(each, 77) for each in full]
        foreach_all_gather_copy_out(in_flight, outputs)
        for output, each in zip(outputs, full, strict=True):
            assert torch.equal(output, each)

    run_on_threads(body, WORLD)


@pytest.mark.parametrize("size", [8, 1])
def test_a_smaller_world_gathers_among_its_own_ranks_only(size: int) -> None:
    specs = specs_of((torch.float32, torch.bfloat16))
    layout = Layout(specs, size)
    fulls = [full_tensors(specs, block) for block in range(WORLD // size)]

    def body(rank: ThreadRank) -> None:
        group = rank.subgroup(size)
        full = fulls[rank.rank // size]
        shards = shards_of(full, specs, rank.rank % size, size)
        outputs = [torch.empty_like(each) for each in full]
        in_flight = foreach_all_gather(shards, layout, gather_config(group))
        foreach_all_gather_copy_out(in_flight, outputs)
        for output, each in zip(outputs, full, strict=True):
            assert torch.equal(output, each)

    run_on_threads(body, WORLD)
