"""Who moves the bytes: alone, and over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import ProcessGroupTransport, SelfTransport, Transport
from support.ranks import distributed


class _Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def test_self_leaves_an_output_that_is_its_input_alone_and_copies_any_other() -> None:
    transport: Transport = SelfTransport()
    group = _Group(1)
    data = torch.arange(4.0)
    version = data._version
    assert transport.all_gather(data, data, group, True) is None  # type: ignore[arg-type]
    assert data._version == version  # nothing was written
    other = torch.zeros(4)
    assert transport.all_gather(other, data, group, False) is None  # type: ignore[arg-type]
    assert torch.equal(other, data)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
def test_the_sum_and_the_average_over_one_rank_are_its_input(op: dist.ReduceOp.RedOpType) -> None:
    data, output = torch.arange(4.0), torch.zeros(4)
    work = SelfTransport().reduce_scatter(output, data, _Group(1), op, True)  # type: ignore[arg-type]
    assert work is None
    assert torch.equal(output, data)


def test_self_is_for_one_rank_only() -> None:
    data = torch.zeros(2)
    with pytest.raises(ValueError, match="process group of 2 ranks"):
        SelfTransport().all_gather(data, data, _Group(2), False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.int64, torch.float8_e4m3fn],
    ids=str,
)
@distributed(2)
def test_a_gather_moves_any_dtype_in_place(dtype: torch.dtype) -> None:
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    output = torch.zeros(6).to(dtype)
    own = output[3 * rank : 3 * rank + 3]
    own.copy_(torch.tensor([rank, 1, 0]))
    work = ProcessGroupTransport().all_gather(output, own, group, True)
    assert work is not None
    work.wait()
    assert torch.equal(output.float(), torch.tensor([0, 1, 0, 1, 1, 0]).to(dtype).float())


@pytest.mark.parametrize("async_op", [True, False])
@distributed(2, 4)
def test_a_reduce_scatter_sums_each_ranks_part(async_op: bool, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    given = torch.arange(2.0 * world_size) * (group.rank() + 1)
    output = torch.zeros(2)
    op = dist.ReduceOp.SUM
    work = ProcessGroupTransport().reduce_scatter(output, given, group, op, async_op)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
    total = torch.arange(2.0 * world_size) * (world_size * (world_size + 1) / 2)
    assert torch.equal(output, total.chunk(world_size)[group.rank()])
