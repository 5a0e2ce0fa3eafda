"""FairScale's bucketer: the same sums in fewer launches, handed out in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm.stand_ins import group_of
from fullshard.comm import EventKind, EventLog, observe
from fullshard.wrappers.fairscale import ReduceScatterBucketer
from support.ranks import distributed, world

KIB = 1 / 1024  # in MiB


def inputs(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> Any:
    """The parts of one rank, different on each; small whole numbers, so that sums are exact."""

    def parts(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + rank)
        return torch.randint(-9, 9, (world().size(), *shape), generator=generator).to(dtype)

    everyones = [parts(rank) for rank in range(world().size())]
    total = torch.stack(everyones).sum(0)[world().rank()]
    return list(everyones[world().rank()]), total


class Results:
    """What callbacks were handed, in order."""

    def __init__(self) -> None:
        self.got: list[tuple[int, torch.Tensor]] = []

    def of(self, number: int) -> Any:
        return lambda tensor: self.got.append((number, tensor))

    @property
    def order(self) -> list[int]:
        return [number for number, _ in self.got]


def reductions(log: EventLog) -> list[int]:
    """The bytes of each launch."""
    return [event.nbytes for event in log.of(EventKind.REDUCE_SCATTER)]


@pytest.mark.parametrize("cap", [-1.0, 0.0, KIB / 4, KIB, 25.0])
@distributed(2, 4, matrix=[4])
def test_each_result_is_the_sum_of_this_ranks_parts(cap: float) -> None:
    shapes = [(3,), (2, 5), (), (40,), (1,), (0,), (7, 3), (300,), (4,)] * 2
    bucketer, results, expected = ReduceScatterBucketer(bucket_cap_mb=cap), Results(), []
    for number, shape in enumerate(shapes):
        parts, total = inputs(shape, number)
        bucketer.reduce_scatter_async(parts, world(), callback_fn=results.of(number))
        for part in parts:
            part.fill_(float("nan"))  # they are the caller's again
        expected.append(total)
    bucketer.flush()
    assert sorted(results.order) == list(range(len(shapes)))
    for number, found in results.got:
        assert found.shape == expected[number].shape
        assert torch.equal(found, expected[number]), number
    bucketer.teardown()


@distributed(2, 4, matrix=[4])
def test_small_inputs_wait_and_travel_together() -> None:
    bucketer, results = ReduceScatterBucketer(KIB), Results()
    log = EventLog()
    with observe(log):
        for number in range(4):
            bucketer.reduce_scatter_async(inputs((3,), number)[0], world(), results.of(number))
        assert results.order == [] and reductions(log) == []
        bucketer.flush()
        assert results.order == [0, 1, 2, 3]
        assert reductions(log) == [4 * 12 * world().size()]
        bucketer.flush()
        assert len(reductions(log)) == 1  # nothing waits, so nothing is sent


@distributed(2, 4, matrix=[4])
def test_a_full_bucket_is_launched_and_so_is_one_into_which_the_next_does_not_fit() -> None:
    ranks = world().size()
    bucketer, results = ReduceScatterBucketer(KIB * ranks / 2), Results()  # 512 bytes each
    log = EventLog()
    with observe(log):
        for number in range(2):
            bucketer.reduce_scatter_async(inputs((64,), number)[0], world(), results.of(number))
        assert results.order == [0, 1]  # 256 bytes each: full
        for number, numel in ((2, 100), (3, 20), (4, 20)):
            bucketer.reduce_scatter_async(inputs((numel,), number)[0], world(), results.of(number))
        assert results.order == [0, 1, 2, 3]  # the last did not fit beside them
        bucketer.flush()
    assert results.order == [0, 1, 2, 3, 4]
    assert reductions(log) == [ranks * 512, ranks * 480, ranks * 80]


@distributed(2, 4, matrix=[4])
def test_a_large_input_overtakes_small_ones() -> None:
    bucketer, results = ReduceScatterBucketer(KIB), Results()
    for number, shape in enumerate([(3,), (1000,), (5,)]):
        bucketer.reduce_scatter_async(inputs(shape, number)[0], world(), results.of(number))
    assert results.order == [1]
    bucketer.flush()
    assert results.order == [1, 0, 2]


@pytest.mark.parametrize("cap", [0, -25])
@distributed(2, 4, matrix=[4])
def test_without_a_bucket_every_call_is_launched_at_once(cap: int) -> None:
    bucketer, results = ReduceScatterBucketer(cap), Results()
    log = EventLog()
    with observe(log):
        for number in range(3):
            bucketer.reduce_scatter_async(inputs((3,), number)[0], world(), results.of(number))
            assert results.order == list(range(number + 1))
    assert reductions(log) == [world().size() * 16] * 3  # 12 bytes take 16


@distributed(2, 4)
def test_each_process_group_and_dtype_has_a_bucket_of_its_own() -> None:
    ranks, rank = world().size(), dist.get_rank()
    halves = [list(range(ranks // 2)), list(range(ranks // 2, ranks))]
    groups = [dist.new_group(half) for half in halves]
    half, mine = halves[rank // (ranks // 2)], groups[rank // (ranks // 2)]
    bucketer, results = ReduceScatterBucketer(), Results()
    few = [torch.full((2,), float(rank + 10 * part)) for part in range(len(half))]
    all_parts = [torch.full((3,), float(rank))] * ranks
    doubled = [part.double() for part in all_parts]
    log = EventLog()
    with observe(log):
        bucketer.reduce_scatter_async(few, mine, results.of(0))
        bucketer.reduce_scatter_async(all_parts, world(), results.of(1))
        bucketer.reduce_scatter_async(doubled, world(), results.of(2))
        bucketer.reduce_scatter_async(few, mine, results.of(4))
        bucketer.flush()
    found = dict(results.got)
    first = float(sum(half) + len(half) * 10 * half.index(rank))
    assert torch.equal(found[0], torch.full((2,), first)) and torch.equal(found[0], found[4])
    assert torch.equal(found[1], torch.full((3,), float(sum(range(ranks)))))
    assert found[2].dtype is torch.float64 and torch.equal(found[2], found[1].double())
    assert len(reductions(log)) == 3


@distributed(2, 4, matrix=[4])
def test_teardown_refuses_while_results_are_due() -> None:
    bucketer = ReduceScatterBucketer(KIB)
    bucketer.reduce_scatter_async(inputs((5,), 0)[0], world())
    with pytest.raises(RuntimeError, match=r"1 reductions.*call flush\(\) first"):
        bucketer.teardown()
    bucketer.flush()
    bucketer.teardown()


def test_wrong_arguments_are_errors_before_any_launch() -> None:
    bucketer, group = ReduceScatterBucketer(), group_of(0, 2)
    with pytest.raises(ValueError, match=r"3 inputs for 2 ranks"):
        bucketer.reduce_scatter_async([torch.ones(1)] * 3, group)
    with pytest.raises(ValueError, match=r"input 1 is torch.float64 of shape \(1,\)"):
        bucketer.reduce_scatter_async([torch.ones(1), torch.ones(1).double()], group)
    with pytest.raises(ValueError, match=r"input 1 is torch.float32 of shape \(2,\)"):
        bucketer.reduce_scatter_async([torch.ones(1), torch.ones(2)], group)
    cap: Any = "25"
    with pytest.raises(TypeError, match=r"bucket_cap_mb is '25'"):
        ReduceScatterBucketer(cap)
