"""A plan's time on this machine: what is measured, what is kept, and how a CPU's step adds up."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.preflight import DEVICES, Device, Here, Links, Plan, measure_links, plan
from fullshard.preflight.compat import DispatchMode
from fullshard.preflight.costs import here as measuring
from fullshard.preflight.costs.call import Call, Items, Operand
from fullshard.preflight.costs.calls import Calls
from fullshard.preflight.costs.collectives import Axis, Collective
from fullshard.preflight.costs.here import UNSHARD, MeasuredCosts
from fullshard.preflight.costs.kernels import Kernel
from fullshard.preflight.costs.ranks import Job, measure_together
from fullshard.preflight.costs.timing import Caches, Moved, time_call
from fullshard.preflight.planning.cpu_timeline import replay_on_cpu
from fullshard.preflight.planning.memory.places import Place
from fullshard.preflight.planning.recorder import Launch
from fullshard.preflight.planning.timeline import Timeline
from fullshard.sharding import fully_shard
from support.ranks import distributed


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).square().mean()
    return found


def shard(model: nn.Module) -> None:
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)


def planned(device: str | Device | Here, mesh: int = 1) -> Plan:
    return plan(build, torch.empty(16, 32), loss, mesh=mesh, shard=shard, device=device)


# -- what is kept of an operation, and how it is called again -------------------------------------


class Kept(DispatchMode):
    """Keeps the calls of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()
        self.found: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kernel = self.calls.kernel_of(func, args, kwargs or {}, result)
        if kernel is not None:
            self.found.append(kernel)
        return result


def _kept(name: str, seen: Kept) -> list[Call]:
    return [each.call for each in seen.found if each.name == f"aten::{name}" and each.call]


def test_an_operation_is_called_again_with_tensors_of_the_same_forms() -> None:
    weights, tokens = torch.ones(50, 8), torch.randint(50, (4, 3))
    with Kept() as seen:
        nn.functional.embedding(tokens, weights)
        torch._foreach_add_([weights.t(), torch.ones(3)], 2.0)
    (embedding,), (several,) = _kept("embedding", seen), _kept("_foreach_add_", seen)
    args, _ = embedding.made()
    assert embedding.function(*args).shape == (4, 3, 8)
    assert args[1].max() < 8, "an index is within every dim"
    (given, _), _ = several.made()
    assert [each.stride() for each in given] == [(1, 8), (1,)]


def test_an_operand_is_as_far_as_what_was_touched_since() -> None:
    weights, others = torch.ones(2**16), torch.ones(2**20)
    with Kept() as seen:
        weights.mul_(2.0)
        weights.mul_(3.0)
        others.add_(1.0)
        weights.mul_(4.0)
    distances = [each.operands[0].distance for each in _kept("mul_", seen)]
    assert distances == [2**26, 0, 2**23], "never, just now, and 4 MiB ago: rounded up"


def test_new_memory_is_what_was_freed_last_of_its_size() -> None:
    with Kept() as seen:
        first = torch.ones(2**18) * 2.0
        del first
        torch.ones(2**18) * 3.0  # where `torch.ones` was, which is freed by now
        torch.ones(2**19) * 4.0
    assert [each.distance for each in _kept("mul", seen)] == [2**26, 2**21, 2**26]


def test_an_operation_is_timed_with_its_operands_touched_first() -> None:
    far = Operand((2**16,), (1,), torch.float32, distance=2**19)
    call = Call("aten::add", "Tensor", Items((far, far), is_list=True), (), distance=2**17)
    assert time_call(call, Caches()) > 0


# -- the clock of a CPU ---------------------------------------------------------------------------


class Costs(MeasuredCosts):
    """A second for an operation; for a collective four, or eight beside computing, half as fast."""

    device = DEVICES["h100"]

    def __init__(self) -> None:
        """Measure nothing."""

    def kernel(self, kernel: Kernel) -> float:
        return 1.0

    def moved(self, move: Collective) -> Moved:
        return Moved(seconds=4.0, beside=8.0, stolen=4.0)


WORK = Kernel("aten::mm", 10, 8, torch.float32)
GATHER = Collective("_allgather_base_", 100, Axis(2))


def _replayed(costs: Costs, *steps: str) -> Timeline:
    numbers, records = {1: 0, 2: 0}, []
    for step in steps:
        stream = 2 if step == "gather" else 1
        numbers[stream] += 1
        after = {2: numbers[2]} if step == "wait" else {}
        work: Kernel | Collective = GATHER if step == "gather" else WORK
        place = Place("forward")
        records.append(Launch(stream, numbers[stream], after, place, work, again=False))
    return replay_on_cpu(records, {1: "default", 2: "collectives"}, costs)


def test_a_rank_waits_for_a_collective_that_it_needs_at_once() -> None:
    found = _replayed(Costs(), "gather", "wait")
    assert found.step_time == pytest.approx(4.0 + 1.0)
    assert found.exposed == pytest.approx(4.0)


def test_a_collective_and_what_is_computed_beside_it_slow_each_other_down() -> None:
    found = _replayed(Costs(), "gather", "compute", "wait")
    assert found.spans[1].end == pytest.approx(2.0), "half as fast"
    assert found.exposed == pytest.approx(0.75 * 4.0), "of which two of eight seconds are over"
    assert found.spans[0].end == pytest.approx(2.0 + 3.0)
    assert found.step_time == pytest.approx(5.0 + 1.0)


def test_what_is_computed_beside_a_collective_that_ends_is_as_fast_as_alone_after_it() -> None:
    found = _replayed(Costs(), "gather", *["compute"] * 6)
    assert found.spans[0].end == pytest.approx(8.0)
    assert found.step_time == pytest.approx(6.0 + 4.0)
    assert found.exposed == pytest.approx(0.0)


def test_collectives_of_one_stream_come_one_after_the_other() -> None:
    found = _replayed(Costs(), "gather", "gather", "compute", "wait")
    first, second, computed, waited = found.spans
    assert (computed.start, computed.end) == pytest.approx((0.0, 2.0))
    assert second.start == first.end == pytest.approx(2.0 + 3.0)
    assert waited.start == second.end == pytest.approx(5.0 + 4.0)


# -- a plan that measures -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Plan, Path]]:
    """A plan for two ranks here, and the file that keeps what was measured."""
    path = tmp_path_factory.mktemp("here") / "costs.json"
    yield planned(Here(threads=1, cache=path), mesh=2), path


@pytest.mark.matrix
def test_a_plan_here_is_added_up_from_operations_and_collectives_that_were_measured(
    measured: tuple[Plan, Path],
) -> None:
    found = measured[0].time
    assert found is not None
    assert found.device.name == "here"
    names = {each.launch.work.name for each in found.spans}
    assert {"aten::addmm", "aten::view", UNSHARD, "_allgather_base_"} <= names
    assert 0 < found.exposed < found.step_time
    assert all(each.end > each.start for each in found.spans)
    text = str(measured[0])
    assert "measured on this machine" in text
    assert "2 ranks at once with 1 threads each" in text
    assert "assumed, not measured" not in text
    assert not found.by_bytes_alone


@pytest.mark.matrix
def test_an_lstm_is_measured_with_the_workspace_that_its_backward_reads() -> None:
    found = plan(
        lambda: nn.LSTM(8, 8), torch.empty(4, 2, 8), lambda model, x: model(x)[0].sum(),
        mesh=1, shard=fully_shard, device=Here(threads=1),
    )  # fmt: skip
    assert found.time is not None
    spans = {each.launch.work.name: each.end - each.start for each in found.time.spans}
    assert spans["aten::mkldnn_rnn_layer_backward"] > 0
    assert "by their bytes alone" not in found.time.device.measured


@pytest.mark.matrix
def test_what_a_file_has_is_not_measured_again(measured: tuple[Plan, Path]) -> None:
    with (
        patch.object(measuring, "measure_together", side_effect=AssertionError),
        patch("fullshard.preflight.costs.memo._kept", {}),
    ):
        again = planned(Here(threads=1, cache=measured[1]), mesh=2)
    assert again.step_time == measured[0].step_time


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"machine": "an abacus", "settings": {}}')
    with pytest.raises(ValueError, match=r"measured on another machine or torch .an abacus"):
        planned(Here(cache=path))
    path = tmp_path / "none.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"holds no measured costs"):
        planned(Here(cache=path))


def test_a_mesh_that_cannot_be_measured_here_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"100000 ranks.*device=Here.ranks=.*links="):
        planned("here", mesh=100_000)
    links = Links(ranks=4, table={})
    with pytest.raises(ValueError, match=r"among 4 ranks, and the mesh .2,. has no axis"):
        planned(Here(links=links), mesh=2)
    with pytest.raises(ValueError, match=r"threads is 0; pass a positive int"):
        Here(threads=0)
    with pytest.raises(ValueError, match=r'"here" for this machine'):
        planned("there")


@pytest.mark.matrix
def test_a_rank_that_fails_to_measure_is_named_with_what_it_wrote() -> None:
    job = Job(ranks=1, threads=1, world=1, moves=[Collective("send", 8, Axis(1))])
    with pytest.raises(RuntimeError, match=r"rank 0 of 1.*(?s:.*)KeyError: 'send'"):
        measure_together(job)


# -- links of a real process group ----------------------------------------------------------------


def test_between_two_sizes_a_collective_is_interpolated_and_beyond_by_bandwidth() -> None:
    row = {1000: Moved(1.0, 0.5, 0.1), 3000: Moved(2.0, 1.5, 0.3)}
    links = Links(ranks=2, table={"allreduce_": row})
    assert links.moved("allreduce_", 10) == row[1000]
    assert links.moved("allreduce_", 2000).seconds == pytest.approx(1.5)
    assert links.moved("allreduce_", 5000) == Moved(3.0, 2.5, 0.5)
    with pytest.raises(ValueError, match=r"broadcast_ was not measured.*measured: allreduce_"):
        links.moved("broadcast_", 8)


def test_links_are_read_as_they_were_written(tmp_path: Path) -> None:
    links = Links(ranks=2, table={"allreduce_": {1000: Moved(1.0, 0.5, 0.1)}})
    links.save(tmp_path / "links.json")
    assert Links.load(tmp_path / "links.json") == links
    (tmp_path / "links.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds no links"):
        Links.load(tmp_path / "links.json")


@distributed(2)
def test_links_are_measured_on_all_ranks_and_the_same_on_each(tmp_path: Path) -> None:
    links = measure_links(sizes=(1024,))
    assert links.ranks == 2
    assert set(links.table) == {"_allgather_base_", "_reduce_scatter_base_", "allreduce_"}
    assert all(each.seconds > 0 for row in links.table.values() for each in row.values())
    told: list[Any] = [None, None]
    dist.all_gather_object(told, links)
    assert told[0] == told[1]
    with pytest.raises(ValueError, match=r"cannot measure send"):
        measure_links(names=("send",))


@distributed(2)
def test_a_rank_that_does_not_come_is_named() -> None:
    group = dist.new_group()  # of this test alone: what was waited for in vain is of no more use
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"Ranks 1 failed to pass monitoredBarrier"):
            measure_links(group, sizes=(1024,), timeout=timedelta(seconds=1))


def test_without_a_process_group_there_are_no_links() -> None:
    with pytest.raises(RuntimeError, match=r"start all ranks .torchrun., and call"):
        measure_links()
