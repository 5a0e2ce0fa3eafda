"""Slow ranks are named by rank, phase and module, and no others are."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fullshard.checkpoint import save_safetensors
from fullshard.comm import waiting
from fullshard.insight import OwnTimes, Phase, SlowRanks, compare_ranks, statistics
from fullshard.policies import CanonicalOrder
from fullshard.samehost.group import SharedGroup, SharedWork
from fullshard.sharding import fully_shard
from support.ranks import cpu_mesh, distributed
from support.slow_ranks import BLOCKS, Case, Clock, Net, build, run_case, train, usual_step

USUAL = {Phase.INPUT: 2.0, Phase.FORWARD: 3.0, Phase.BACKWARD: 6.0, Phase.OPTIMIZER: 4.0}
USUAL_STEP = 2.0 + 3 * (3.0 + 6.0) + 4.0
"""Milliseconds of the clock in each phase, of forward and backward in each block."""


class Delays:
    """Delays on a clock of this rank: the usual ones, and what one rank takes longer."""

    def __init__(self, clock: Clock, **longer: Any) -> None:
        self.clock = clock
        self.longer = longer
        self.calls = 0

    def __call__(self, phase: Phase, module: str) -> None:
        self.clock.pass_ms(USUAL.get(phase, 0.0))
        slow = self.longer
        here = slow and (slow["rank"], slow["phase"]) == (dist.get_rank(), phase)
        if here and slow.get("module", module) == module:
            self.clock.pass_ms(slow["ms"])


def watching(**longer: Any) -> tuple[Clock, Delays, Any, SlowRanks]:
    """A clock, its delays, a net that they delay, and what watches it on that clock."""
    clock = Clock()
    delays = Delays(clock, **longer)
    return clock, delays, build(delays), SlowRanks(clock=clock)


def watched(steps: int = 4, *, accumulate: int = 1, how: Any = None, **longer: Any) -> Any:
    clock = Clock()
    delays = Delays(clock, **longer)
    net = build(delays, **(how or {}))
    with SlowRanks(clock=clock) as watch:
        train(net, delays, steps, accumulate=accumulate)
    return watch


@distributed(2, 4)
def test_a_delay_is_attributed_to_its_rank_phase_and_module(world_size: int) -> None:
    slow = world_size - 1
    places = [(Phase.INPUT, ""), (Phase.OPTIMIZER, "step"), (Phase.FILES, "checkpoint")]
    places += [(Phase.FORWARD, BLOCKS[1]), (Phase.BACKWARD, BLOCKS[2])]
    _, delays, net, watch = watching()
    for phase, module in places:
        delays.longer = {"rank": slow, "phase": phase, "module": module, "ms": 8.0}
        with watch:
            train(net, delays, 4)
        report = watch.report()
        (found,) = report.slow
        assert (found.rank, found.phase, found.module) == (slow, phase, module)
        assert found.seconds == pytest.approx(8e-3)
        assert len(report.steps) == 4
        for each, usual in USUAL.items():
            own = [usual * (3 if each in (Phase.FORWARD, Phase.BACKWARD) else 1)] * world_size
            own[slow] += 8.0 if each is phase else 0
            assert [1000 * seconds for seconds in report.own[each]] == pytest.approx(own)


@distributed(2)
def test_ranks_of_equal_own_time_are_not_named() -> None:
    report = watched().report()
    assert report.slow == ()
    assert report.step_seconds == pytest.approx(USUAL_STEP / 1000)
    assert str(report).startswith("no rank is slow")


@distributed(2)
def test_a_rank_is_named_from_the_bar_on() -> None:
    at = 0.1 * (USUAL_STEP + 2)
    below = watched(rank=1, phase=Phase.INPUT, ms=at - 0.5)
    above = watched(rank=1, phase=Phase.INPUT, ms=at + 0.5)
    assert below.report().slow == ()
    assert [each.rank for each in above.report().slow] == [1]
    with pytest.raises(ValueError, match="bar is 10; pass a part of a step"):
        above.report(bar=10)


@distributed(2)
def test_time_in_which_a_rank_waits_is_not_its_own() -> None:
    clock, delays, net, watch = watching()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with watch:
        for _ in range(4):
            delays(Phase.INPUT, "")
            loss = net(torch.ones(4, 8)).square().mean()
            loss.backward()
            with waiting("the loss of all"):
                clock.pass_ms(50 if dist.get_rank() else 0)  # rank 0 comes last
                dist.all_reduce(loss.detach())
            optimizer.step()
    report = watch.report()
    assert report.slow == ()
    (last,) = report.last
    assert (last.collective, last.rank, last.times) == ("the loss of all", 0, 4)
    assert last.seconds == pytest.approx(0.05)


@distributed(2)
def test_a_rank_that_waits_in_a_gather_or_reduction_waited_there() -> None:
    """The clock passes in the wait itself: as it does if another rank has not come."""
    clock, delays, net, watch = watching()
    wait = SharedWork.wait

    def slowly(flight: Any, *given: Any) -> Any:
        clock.pass_ms(5)
        return wait(flight, *given)

    with watch, patch.object(SharedWork, "wait", slowly):
        train(net, delays, 3)
    (*_, step) = watch.own_times().steps
    names = {f"{kind} {name}" for kind in ("gather", "reduction") for name in (*BLOCKS, "(root)")}
    assert {name for name, seconds in step.waits.items() if seconds} == names
    assert sum(step.own.values()) == pytest.approx(USUAL_STEP / 1000)


@distributed(2)
def test_adding_what_others_sent_is_own_time_also_in_a_wait() -> None:
    """A rank adds it as it launches the next collective, or in the wait: which one is chance."""
    clock, delays, net, watch = watching()
    begun = SharedGroup._begun

    def begins(group: Any, number: int, collective: Any, region: torch.Tensor) -> Any:
        def read(memory: torch.Tensor) -> None:
            clock.pass_ms(5)
            collective.read(memory)

        return begun(group, number, replace(collective, read=read), region)

    with watch, patch.object(SharedGroup, "_begun", begins):
        train(net, delays, 3)
    (*_, step) = watch.own_times().steps
    assert sum(step.waits.values()) == 0
    reductions = len(BLOCKS) + 1
    assert sum(step.own.values()) >= (USUAL_STEP + 5 * reductions) / 1000


@distributed(2)
def test_micro_batches_belong_to_one_step() -> None:
    report = watched(
        3, accumulate=3, rank=0, phase=Phase.FORWARD, module=BLOCKS[0], ms=5.0
    ).report()
    (found,) = report.slow
    assert (found.rank, found.module) == (0, BLOCKS[0])
    assert found.seconds == pytest.approx(3 * 5e-3)
    assert len(report.steps) == 3
    assert report.own[Phase.INPUT] == pytest.approx([3 * 2e-3] * 2)


@distributed(4)
def test_it_works_on_other_meshes() -> None:
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for how in ({"mesh": hybrid}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}):
        report = watched(
            3, how=how, rank=2, phase=Phase.BACKWARD, module=BLOCKS[1], ms=9.0
        ).report()
        (found,) = report.slow
        assert (found.rank, found.phase, found.module) == (2, Phase.BACKWARD, BLOCKS[1])


@distributed(2)
def test_several_models_and_optimizers_are_one_step() -> None:
    clock = Clock()
    delays = Delays(clock, rank=1, phase=Phase.FORWARD, module=BLOCKS[2], ms=9.0)
    nets = [build(delays) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in nets]
    with SlowRanks(clock=clock) as watch:
        for _ in range(3):
            for net in nets:
                net(torch.ones(4, 8)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    report = watch.report()
    assert report.steps == (2, 4, 6)  # counted by optimizers
    (found,) = report.slow
    assert found.rank == 1
    assert found.seconds == pytest.approx(2 * 9e-3)


@distributed(2)
def test_ranks_may_skip_a_group() -> None:
    clock = Clock()
    delays = Delays(clock)

    class Skipping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            used = self.blocks[: 3 if dist.get_rank() == 0 else 2]
            for block in used:
                x = block(x)
            return self.head(x)

    net: Any = Skipping(8, delays)
    for block in net.blocks:
        fully_shard(block, mesh=cpu_mesh())
    fully_shard(net, mesh=cpu_mesh())
    net.set_schedule(CanonicalOrder())
    with SlowRanks(clock=clock) as watch:
        train(net, delays, 3)
    report = watch.report()
    # rank 0 runs a block more than rank 1, and is slow by that
    assert {(each.rank, each.phase, each.module) for each in report.slow} == {
        (0, Phase.FORWARD, BLOCKS[2]),
        (0, Phase.BACKWARD, BLOCKS[2]),
    }


@distributed(2)
def test_a_step_that_raised_belongs_to_the_next_one() -> None:
    clock = Clock()
    failing = [False]
    delays = Delays(clock)

    def delay(phase: Phase, module: str) -> None:
        delays(phase, module)
        if failing[0] and module == BLOCKS[1]:
            raise RuntimeError("on purpose")

    net = build(delay)
    with SlowRanks(clock=clock) as watch:
        train(net, delay, 1)
        for _ in range(2):
            failing[0] = True
            with pytest.raises(RuntimeError, match="on purpose"):
                train(net, delay, 1)
            net.reset_iter_state()
            failing[0] = False
            train(net, delay, 1)
    report = watch.report()
    assert report.slow == ()
    assert len(report.steps) == 3
    step = USUAL_STEP + USUAL[Phase.INPUT] + 2 * USUAL[Phase.FORWARD]  # what ran before the error
    assert report.step_seconds == pytest.approx(step / 1000)


@distributed(2)
def test_memory_is_bounded_and_the_latest_steps_are_kept() -> None:
    clock = Clock()
    delays = Delays(clock)
    net = build(delays)
    with SlowRanks(clock=clock, capacity=150) as watch:
        train(net, delays, 30)
        assert len(watch._timeline._ring) == 150
        steps = watch.own_times().steps
    assert 0 < len(steps) < 10
    assert [step.number for step in steps] == list(range(31 - len(steps), 31))
    for step in steps:
        assert sum(step.own.values()) == pytest.approx(USUAL_STEP / 1000)


@distributed(2)
def test_each_report_is_of_the_steps_since_the_one_before() -> None:
    clock, delays, net, watch = watching()
    with watch:
        train(net, delays, 2)
        assert watch.report().steps == (1, 2)
        clock.pass_ms(1000)  # what a user does with a report
        train(net, delays, 3)
        assert watch.report().steps == (3, 4, 5)
        assert watch.report().steps == ()


@distributed(2)
def test_saved_weights_are_access_to_files(tmp_path: Path) -> None:
    clock, delays, net, watch = watching()
    slow = "fullshard.checkpoint.weights.save.os.pwrite"
    write = os.pwrite

    def writes(*given: Any) -> int:
        clock.pass_ms(30)
        return write(*given)

    with watch:
        train(net, delays, 3)
        with patch(slow, writes) if dist.get_rank() == 0 else patch(slow, write):
            save_safetensors(net, tmp_path)
        train(net, delays, 3)
    report = watch.report()
    (found,) = report.slow
    assert (found.rank, found.phase, found.module) == (0, Phase.FILES, "weights")


@distributed(2)
def test_statistics_show_it() -> None:
    _, delays, net, watch = watching(rank=1, phase=Phase.INPUT, ms=8.0)
    with watch:
        train(net, delays, 3)
    found = statistics(net, slow_ranks=watch)
    assert found.slow_ranks is not None
    assert [each.rank for each in found.slow_ranks.slow] == [1]
    assert "rank 1 is slow in input: 8.0 ms a step more" in str(found)
    assert statistics(net).slow_ranks is None


@distributed(2)
def test_without_a_watch_nothing_is_kept() -> None:
    watch = watched(2)
    before = len(watch.own_times().steps)
    delays = Delays(Clock())
    train(build(delays), delays, 2)
    assert (before, watch.own_times().steps) == (2, ())


def test_own_times_survive_json_and_are_compared_by_number_of_step() -> None:
    def times(first: int, ms: int) -> OwnTimes:
        own = [["forward", "a", [1000 * ms] * 4], ["input", "", [1000] * 4]]
        value = {
            "steps": list(range(first, first + 4)),
            "own": own,
            "waits": [["gather a", [0, -1, 7, 0]]],
        }
        return OwnTimes.of(json.loads(json.dumps(value)))

    assert OwnTimes.of(times(3, 5).value()) == times(3, 5)
    report = compare_ranks({0: times(1, 5), 7: times(2, 9)})
    assert report.steps == (2, 3, 4)
    assert [(each.rank, each.phase, each.module) for each in report.slow] == [
        (7, Phase.FORWARD, "a")
    ]
    assert json.loads(json.dumps(report.value()))["slow"][0]["phase"] == "forward"
    assert compare_ranks({0: times(1, 5), 1: times(9, 5)}).steps == ()


# -- by the clock on the wall ---------------------------------------------------------------------

CASES, CLEAN, STEPS = 50, 25, 24


@pytest.mark.matrix
@distributed(2, 4, timeout=900)
def test_drawn_delays_are_attributed_to_the_right_rank_and_phase(world_size: int) -> None:
    """Delays of a fifth of a step to a whole one, on a machine with other work."""
    rank, draw = dist.get_rank(), random.Random(world_size)
    wrong: list[Any] = []
    for _ in range(CASES):
        usual = [usual_step(rank)]
        dist.broadcast_object_list(usual)
        case = Case.drawn(draw, world_size)
        report = run_case(case, rank, STEPS, usual[0])
        first = [(each.rank, each.phase) for each in report.slow[:1]]
        if first != [(case.rank, case.phase)]:
            wrong.append((case, report.slow))
    assert len(wrong) <= CASES * 0.05, wrong


@pytest.mark.matrix
@distributed(2, 4, timeout=900)
def test_no_rank_is_named_in_clean_runs(world_size: int) -> None:
    named = [
        r.slow
        for r in (run_case(None, dist.get_rank(), STEPS, 0.0) for _ in range(CLEAN))
        if r.slow
    ]
    assert named == []
