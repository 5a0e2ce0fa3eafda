"""Ranks of one host that share memory: what arrives, in what order, and how far a rank runs ahead.

The process group's own transport, or plain arithmetic in rank order, is the definition.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm.launches import SUM, finish, in_rank_order, launch
from fullshard.comm import (
    CollectiveMismatchError,
    ProcessGroupTransport,
    Transport,
)
from fullshard.samehost import AllToAllTransport, SharedMemoryError, SharedMemoryTransport, regions
from fullshard.samehost.group import shared_group
from support.ranks import distributed, new_group, run_on_ranks, world

SHARED = SharedMemoryTransport()
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
]
KINDS = ["gather", "reduction", "all-reduce"]


# -- what arrives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@distributed(4)
def test_a_reduction_does_not_depend_on_who_comes_first(
    dtype: torch.dtype, world_size: int
) -> None:
    """Gloo's order of additions depends on the position; ours is that of the ranks, always."""
    rank = world().rank()
    generator = torch.Generator().manual_seed(5)
    inputs = [
        torch.randn(64 * world_size, generator=generator).to(dtype) for _ in range(world_size)
    ]
    wanted = in_rank_order(inputs)
    # Ranks meet where memory must grow: that must not be where one of them waits for another.
    finish(SHARED.all_reduce(torch.ones(512 * world_size), SUM, world(), False))
    for late in range(world_size):
        part, total = torch.empty(64, dtype=dtype), inputs[rank].clone()
        if rank == late:
            dist.barrier()
        works = [
            SHARED.reduce_scatter(part, inputs[rank].clone(), world(), SUM, True),
            SHARED.all_reduce(total, SUM, world(), True),
        ]
        if rank != late:
            dist.barrier()
        for work in works:
            finish(work)
        assert torch.equal(total, wanted)
        assert torch.equal(part, wanted.chunk(world_size)[rank])


@pytest.mark.parametrize("transport", [SHARED, ProcessGroupTransport()], ids=["shared", "gloo"])
@distributed(2)
def test_nothing_is_sent_of_nothing(transport: Transport) -> None:
    empty = torch.empty(0)
    for each in (SHARED, AllToAllTransport()):
        finish(each.all_gather(empty, empty, world(), True))
        finish(each.reduce_scatter(empty, empty, world(), SUM, True))
    assert SHARED.all_reduce(empty, SUM, world(), True) is None
    output = torch.zeros(2)
    finish(transport.all_gather(output, torch.ones(1), world(), True))
    assert output.tolist() == [1, 1]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    calls=st.lists(
        st.tuples(
            st.integers(0, 3000), st.sampled_from(DTYPES), st.sampled_from(KINDS), st.integers(0, 5)
        ),
        min_size=1,
        max_size=30,
    )
)
def test_any_sequence_of_collectives_gives_what_its_definition_says(
    calls: list[tuple[int, torch.dtype, str, int]],
) -> None:
    run_on_ranks(_any_sequence, 4, calls)


def _any_sequence(calls: list[tuple[int, torch.dtype, str, int]]) -> None:
    """Collectives of any size, each waited for some calls later than it was launched.

    The largest travel in spans.
    """
    with patch.multiple(regions, _WHOLE=8000, _SPAN=3000):
        flying: list[tuple[int, dist.Work | None, torch.Tensor, torch.Tensor]] = []
        for number, (numel, dtype, kind, delay) in enumerate(calls):
            due = number + delay + world().rank()
            flying.append((due, *launch(SHARED, kind, numel, dtype, salt=number)))
            for ready in [each for each in flying if each[0] <= number]:
                finish(ready[1])
                assert torch.equal(ready[2], ready[3])
                flying = [each for each in flying if each is not ready]
        for _, work, output, wanted in reversed(flying):
            finish(work)
            assert torch.equal(output, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@distributed(2, 4)
def test_collectives_in_spans_give_the_same_bits_in_little_memory(
    dtype: torch.dtype, world_size: int
) -> None:
    group, rank, numel = new_group(), dist.get_rank(), 5000
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(world_size * numel, generator=generator) for _ in range(world_size)]
    given = [each.to(dtype) for each in given]
    with patch.multiple(regions, _WHOLE=4000, _SPAN=1000):
        reduced, gathered = torch.empty(numel, dtype=dtype), torch.empty(0, dtype=dtype)
        finish(SHARED.reduce_scatter(reduced, given[rank], group, SUM, True))
        gathered = torch.empty(world_size * numel, dtype=dtype)
        finish(SHARED.all_gather(gathered, reduced, group, True))
        total = given[rank].clone()
        finish(SHARED.all_reduce(total, SUM, group, True))
    assert torch.equal(total, in_rank_order(given))
    assert torch.equal(gathered, total)
    assert shared_group(group).capacity <= 8192 * (world_size - 1)
    dist.destroy_process_group(group)


# -- ahead and behind -----------------------------------------------------------------------------


@pytest.mark.cross
@pytest.mark.parametrize("numel", [3, 50_000])
@distributed(2, 4)
def test_a_rank_may_launch_any_number_before_it_waits_for_one(numel: int, world_size: int) -> None:
    """More than there is room for; the even ranks wait at once, the odd ones at the end."""
    rank = world().rank()
    flying = []
    for number in range(120):
        output = torch.zeros(numel * world_size)
        own = torch.full((numel,), float(1000 * rank + number))
        work = SHARED.all_gather(output, own, world(), True)
        own.fill_(-1)  # it was taken at the launch
        flying.append((output, work))
        if rank % 2 == 0:
            finish(work)
    for number, (output, work) in reversed(list(enumerate(flying))):
        finish(work)
        firsts = output.view(world_size, numel)[:, 0].tolist()
        lasts = output.view(world_size, numel)[:, -1].tolist()
        assert firsts == lasts == [1000 * each + number for each in range(world_size)]


@distributed(2)
def test_a_rank_may_be_one_of_the_largest_collectives_ahead() -> None:
    """The other launches the second only after this one."""
    group = new_group(timeout=timedelta(seconds=20))
    outputs = [torch.zeros(600_000) for _ in range(2)]

    def launch(number: int) -> dist.Work | None:
        own = torch.full((300_000,), float(10 * number + group.rank()))
        return SHARED.all_gather(outputs[number], own, group, True)

    finish(launch(0))  # makes the room
    if group.rank() == 1:
        dist.barrier()
    flying = [launch(1)]
    if group.rank() == 0:
        dist.barrier()
    for work in flying:
        finish(work)
    ends = [(output[0].item(), output[-1].item()) for output in outputs]
    assert ends == [(0, 1), (10, 11)]
    dist.destroy_process_group(group)


@distributed(2)
def test_a_work_is_completed_once_the_other_rank_has_come() -> None:
    group = world()
    output = torch.zeros(2)
    SHARED.all_gather(output, torch.zeros(1), group, False)  # from now on no launch waits
    if group.rank() == 0:
        work = SHARED.all_gather(output, torch.ones(1), group, True)
        assert work is not None
        assert not work.is_completed()
        dist.barrier()
        dist.barrier()
    else:
        dist.barrier()
        work = SHARED.all_gather(output, torch.ones(1), group, True)
        dist.barrier()
    assert work is not None
    assert work.is_completed()
    assert work.wait()
    assert work.wait()
    assert output.tolist() == [1, 1]


@distributed(2)
def test_a_work_that_nobody_waits_for_is_forgotten() -> None:
    for number in range(100):
        SHARED.all_gather(torch.empty(2), torch.ones(1), world(), True)
        if number % 10 == 0:
            output = torch.zeros(2)
            SHARED.all_gather(output, torch.full((1,), float(number)), world(), False)
            assert output.tolist() == [number, number]


@distributed(2)
def test_memory_grows_with_the_largest_collective_and_the_old_is_given_back() -> None:
    group = world()
    SHARED.all_gather(torch.zeros(2), torch.ones(1), group, False)
    gc.collect()
    before = _segments()  # the group's own, and those of groups that are alive from elsewhere
    held = []
    for numel in (10, 300_000, 20, 900_000):
        output = torch.zeros(2 * numel)
        SHARED.all_gather(output, torch.full((numel,), 1.0), group, False)
        assert output.all()
        gc.collect()
        held.append(_segments())
    assert shared_group(group).capacity >= 2 * 900_000 * 2 * 4
    assert held == [before] * 4


@distributed(2)
def test_a_collective_in_flight_survives_the_growth_of_the_segment() -> None:
    rank = world().rank()
    small, large = torch.zeros(2), torch.zeros(3_000_000)
    first = SHARED.all_gather(small, torch.full((1,), 1.0 + rank), world(), True)
    second = SHARED.all_gather(large, torch.full((1_500_000,), 3.0), world(), True)
    finish(second)
    finish(first)
    assert small.tolist() == [1, 2]
    assert bool((large == 3).all())


def _segments() -> int:
    """Segments that this process has open or mapped."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return sum("memfd:fullshard" in link for link in links)


# -- process groups -------------------------------------------------------------------------------


@distributed(4)
def test_overlapping_process_groups_do_not_disturb_each_other() -> None:
    """Rows and columns of a 2 by 2 mesh, and the world, with collectives of each in flight."""
    rank = world().rank()
    row = [rank // 2 * 2, rank // 2 * 2 + 1]
    column = [rank % 2, rank % 2 + 2]
    groups = [(new_group(ranks), ranks) for ranks in (row, column)]
    groups.append((world(), [0, 1, 2, 3]))
    flying = []
    for number in range(30):
        for group, ranks in groups:
            output = torch.zeros(len(ranks))
            own = torch.full((1,), float(10 * rank + number))
            flying.append((output, SHARED.all_gather(output, own, group, True), ranks, number))
    for output, work, ranks, number in flying:
        finish(work)
        assert output.tolist() == [10 * each + number for each in ranks]


@distributed(2)
def test_descriptors_and_memory_go_with_the_process_group() -> None:
    gc.collect()
    dist.barrier()
    before = len(os.listdir("/proc/self/fd")), _segments()
    for _ in range(3):
        group = new_group()
        SHARED.all_gather(torch.zeros(200_000), torch.zeros(100_000), group, False)
        assert _segments() == before[1] + 1
        dist.destroy_process_group(group)
        del group
        gc.collect()
    assert _segments() == before[1]
    assert len(os.listdir("/proc/self/fd")) <= before[0]


@distributed(2)
def test_inference_and_training_may_take_turns() -> None:
    group = new_group()
    flying = []
    for number in range(6):
        with torch.inference_mode(number % 2 == 0):
            gathered, reduced = torch.zeros(2), torch.zeros(1)
            own, both = torch.full((1,), float(number)), torch.full((2,), float(number))
            works = [
                SHARED.all_gather(gathered, own, group, True),
                SHARED.reduce_scatter(reduced, both, group, SUM, True),
            ]
            flying.append((gathered, reduced, works))
    for number, (gathered, reduced, works) in enumerate(flying):
        for work in works:
            finish(work)
        assert gathered.tolist() == [number, number]
        assert reduced.tolist() == [2 * number]


# -- what is refused ------------------------------------------------------------------------------


def _gather(output: torch.Tensor, input: torch.Tensor) -> None:
    SHARED.all_gather(output, input, world(), False)


def _reduce(output: torch.Tensor, input: torch.Tensor) -> None:
    SHARED.reduce_scatter(output, input, world(), SUM, False)


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = SUM) -> None:
    SHARED.all_reduce(tensor, op, world(), False)


@pytest.mark.parametrize(
    ("call", "given_in", "message"),
    [
        (_gather, (torch.zeros(5), torch.zeros(2)), "one must be the world size times the other"),
        (_gather, (torch.zeros(4), torch.zeros(4)[::2]), "moves contiguous CPU tensors"),
        (_gather, (torch.zeros(4, device="meta"), torch.zeros(2, device="meta")), "on meta"),
        (_reduce, (torch.zeros(2), torch.zeros(4).half()), "in one dtype"),
        (_reduce, (torch.zeros(2).bool(), torch.zeros(4).bool()), r"sum of torch\.bool"),
        (_all_reduce, (torch.zeros(2, 3).t(),), "contiguous CPU tensors"),
        (_all_reduce, (torch.zeros(2).bool(),), r"sum of torch\.bool"),
        (_all_reduce, (torch.ones(1), dist.ReduceOp.BOR), "bor; it must be one of"),
    ],
)
@distributed(2)
def test_what_does_not_fit_is_refused_before_anything_is_sent(
    call: Callable[..., None], given_in: tuple[Any, ...], message: str
) -> None:
    before = shared_group(world()).launched
    with pytest.raises(ValueError, match=message):
        call(*given_in)
    assert shared_group(world()).launched == before


@pytest.mark.parametrize("what", ["kind", "size", "dtype", "growth", "all-reduce"])
@distributed(2)
def test_ranks_that_come_to_different_collectives_are_told(what: str) -> None:
    group = new_group()
    rank = world().rank()
    SHARED.all_gather(torch.zeros(2), torch.zeros(1), group, False)
    numel = {"size": 1 + rank, "all-reduce": 1 + rank, "growth": 1 + rank * 900_000}.get(what, 1)
    dtype = torch.int32 if what == "dtype" and rank else torch.float32
    with pytest.raises(CollectiveMismatchError) as caught:
        if what == "all-reduce":
            SHARED.all_reduce(torch.zeros(numel), SUM, group, False)
        elif what == "kind" and rank:
            SHARED.all_gather(torch.zeros(2 * numel), torch.zeros(numel), group, False)
        else:
            given_in = torch.zeros(2 * numel, dtype=dtype)
            SHARED.reduce_scatter(torch.zeros(numel, dtype=dtype), given_in, group, SUM, False)
    said = str(caught.value)
    assert f"rank {1 - rank}" in said or f"rank {rank} came to" in said
    assert what != "all-reduce" or ("an all-reduce of" in said and "bytes per rank" in said)
    with pytest.raises(SharedMemoryError, match="out of use since"):
        SHARED.all_gather(torch.zeros(2), torch.zeros(1), group, False)
