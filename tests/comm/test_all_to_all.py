"""All-to-all reduce-scatters, against sums by hand and the process group's own."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import (
    AllToAllTransport,
    ProcessGroupTransport,
    SharedMemoryError,
    same_host_transport,
)
from fullshard.comm.same_host import same_host
from fullshard.comm.transports.rank_order import reduce_in_rank_order
from support.ranks import distributed

ALL_TO_ALL = AllToAllTransport()


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def given_by(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 8).to(dtype)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@distributed(2, 4, matrix=[4])
def test_each_rank_gets_its_part_added_in_rank_order(
    dtype: torch.dtype, asynchronous: bool
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        output = torch.zeros(5, dtype=dtype)
        mine = given_by(rank, 5 * size, dtype)
        work = ALL_TO_ALL.reduce_scatter(output, mine, world(), op, asynchronous)
        assert (work is not None) == asynchronous
        if work is not None:
            work.wait()
            work.wait()  # again: nothing
            assert work.is_completed()
        parts = [given_by(each, 5 * size, dtype).view(size, 5)[rank] for each in range(size)]
        wanted = torch.zeros(5, dtype=dtype)
        reduce_in_rank_order(parts, wanted, op)
        assert torch.equal(output, wanted)


@distributed(2)
def test_two_ranks_get_the_process_groups_own_result_to_the_bit() -> None:
    mine = given_by(dist.get_rank(), 2000, torch.float32)
    outputs = []
    for transport in (ALL_TO_ALL, ProcessGroupTransport()):
        output = torch.zeros(1000)
        transport.reduce_scatter(output, mine.clone(), world(), dist.ReduceOp.SUM, False)
        gathered = torch.zeros(2000)
        transport.all_gather(gathered, output, world(), False)
        outputs.append(gathered)
    assert torch.equal(*outputs)


@distributed(2)
def test_what_cannot_be_reduced_is_an_error_before_anything_is_sent() -> None:
    sum_ = dist.ReduceOp.SUM
    with pytest.raises(ValueError, match="an input of 5 elements and an output of 3 for 2 ranks"):
        ALL_TO_ALL.reduce_scatter(torch.zeros(3), torch.zeros(5), world(), sum_, False)
    with pytest.raises(ValueError, match=r"avg of torch\.int64"):
        whole = torch.zeros(4, dtype=torch.int64)
        ALL_TO_ALL.reduce_scatter(whole[:2], whole, world(), dist.ReduceOp.AVG, False)
    dist.barrier()


@distributed(2)
def test_gloo_ranks_that_cannot_share_memory_exchange() -> None:
    group: Any = dist.new_group()
    apart = patch.object(same_host, "shared_group", side_effect=SharedMemoryError("two hosts"))
    with apart:
        assert same_host_transport(group) == ALL_TO_ALL
    dist.destroy_process_group(group)
