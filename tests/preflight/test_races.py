"""What the checker reports of small programs written by hand, each beside the right one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm.runtime.compat import gather_into, reduce_scatter_into
from fullshard.preflight.races import (
    Kind,
    RaceError,
    RaceReport,
    UnknownCollectiveError,
    check,
    watch_races,
)

cpu = torch.get_device_module("cpu")


_check = partial(check, expect_collectives=False)  # most programs here are no training


def _kinds(report: RaceReport) -> set[Kind]:
    return {race.kind for race in report.races}


def _produce(stream: Any) -> torch.Tensor:
    with cpu.stream(stream):
        return torch.ones(8) * 2


def test_a_result_used_without_a_wait_is_reported_with_both_streams_and_lines() -> None:
    def program() -> None:
        made = _produce(cpu.Stream())
        made + 1

    report = _check(program)
    race = next(race for race in report.races if race.kind is Kind.ACCESS)
    assert (race.first.operation, race.second.operation) == ("aten::mul", "aten::add")
    assert race.first.writes and not race.second.writes
    assert (race.first.stream, race.second.stream) == ("stream 2", "default")
    assert "in _produce" in race.first.line and "in _produce" not in race.second.line
    assert "test_races.py" in race.second.line and "program" in race.second.line
    with pytest.raises(RaceError, match="no event orders"):
        report.raise_if_any()


def _event_wait(side: Any) -> None:
    event = torch.Event()
    event.record(side)
    event.wait()


def _event_query(side: Any) -> None:
    assert side.record_event().query()


@pytest.mark.parametrize(
    "wait",
    [
        lambda side: cpu.current_stream().wait_event(side.record_event()),
        lambda side: cpu.current_stream().wait_stream(side),
        _event_wait,
        _event_query,
        lambda side: side.synchronize(),
        lambda side: side.record_event().synchronize(),
        lambda side: cpu.synchronize(),
        lambda side: torch.accelerator.synchronize(),
    ],
)
def test_each_way_to_wait_orders(wait: Callable[[Any], None]) -> None:
    def program() -> None:
        side = cpu.Stream()
        made = _produce(side)
        wait(side)
        result = made + 1
        side.wait_stream(cpu.current_stream())  # made goes back to the side stream
        del made, result

    _check(program).raise_if_any()


def test_an_event_recorded_too_early_orders_nothing() -> None:
    def program() -> None:
        side = cpu.Stream()
        event = side.record_event()
        made = _produce(side)
        cpu.current_stream().wait_event(event)
        made + 1

    assert Kind.ACCESS in _kinds(_check(program))


def test_order_is_passed_on_over_a_third_stream() -> None:
    def program() -> None:
        one, two = cpu.Stream(), cpu.Stream()
        made = _produce(one)
        two.wait_stream(one)
        cpu.current_stream().wait_stream(two)
        made.add_(1)
        one.wait_stream(cpu.current_stream())
        del made

    _check(program).raise_if_any()


def test_two_reads_need_no_order() -> None:
    def program() -> None:
        shared = torch.ones(8)
        side = cpu.Stream()
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            shared.sum()
        shared.sum()
        cpu.current_stream().wait_stream(side)

    _check(program).raise_if_any()


def test_a_write_after_anothers_read_is_reported() -> None:
    def program() -> None:
        shared = torch.ones(8)
        side = cpu.Stream()
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            total = shared.sum()
        shared.zero_()
        cpu.current_stream().wait_stream(side)
        del total

    (race,) = _check(program).races
    assert (race.first.operation, race.second.operation) == ("aten::sum", "aten::zero_")


@pytest.mark.parametrize("column", [0, 1])
def test_columns_of_a_matrix_are_apart(column: int) -> None:
    def program() -> None:
        matrix = torch.zeros(64, 2)
        side = cpu.Stream()
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            matrix[:, 0].fill_(1)
        matrix[:, column].fill_(2)
        cpu.current_stream().wait_stream(side)

    assert _check(program).ok == (column == 1)


def test_memory_freed_while_another_stream_uses_it_is_reported() -> None:
    def program(careful: bool) -> None:
        side = cpu.Stream()
        made = torch.ones(8)
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            made.sum()
        if careful:
            cpu.current_stream().wait_stream(side)
        del made
        torch.ones(1)

    assert _check(lambda: program(True)).ok
    (race,) = _check(lambda: program(False)).races
    assert race.kind is Kind.FREED and race.second.operation == "freed"


def test_record_stream_lets_memory_wait() -> None:
    def program() -> None:
        side = cpu.Stream()
        made = torch.ones(8)
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            made.sum()
        made.record_stream(side)
        del made
        torch.ones(1)

    _check(program).raise_if_any()


def test_a_storage_resized_to_nothing_is_freed_and_resized_back_is_allocated() -> None:
    def program(free_waits: bool, use_waits: bool) -> None:
        main, side = cpu.current_stream(), cpu.Stream()
        made = torch.ones(8)
        side.wait_stream(main)
        with cpu.stream(side):
            made.sum()
        if free_waits:
            main.wait_stream(side)
        made.untyped_storage().resize_(0)
        torch.ones(1)  # what the memory may serve meanwhile
        made.untyped_storage().resize_(32)
        if use_waits:
            side.wait_stream(main)
        with cpu.stream(side):
            made.fill_(1)
        main.wait_stream(side)

    assert _check(lambda: program(True, True)).ok
    assert _kinds(_check(lambda: program(False, True))) == {Kind.FREED}
    assert _kinds(_check(lambda: program(True, False))) == {Kind.ALLOCATED}


_USES: dict[str, Callable[[torch.Tensor], object]] = {
    "a read": lambda freed: freed + 1,
    "a write": lambda freed: freed.zero_(),
    "a list": lambda freed: torch._foreach_add([freed], 1),
    "the host": lambda freed: freed.tolist(),
    "a collective": lambda freed: gather_into(torch.empty(16), freed, _world(), False),
}


def _world() -> Any:
    return dist.group.WORLD


@pytest.mark.parametrize("use", _USES)
def test_a_view_of_freed_memory_stops_the_program_where_it_is_used(use: str) -> None:
    after: list[str] = []

    def program(mesh: Any, freed: bool) -> None:
        made = torch.ones(8)
        view = made.narrow(0, 2, 4)
        if freed:
            made.untyped_storage().resize_(0)
        torch.zeros_like(view)  # which takes its shape alone
        _USES[use](view)
        after.append(use)

    assert _check(lambda mesh: program(mesh, False), mesh=4).ok and after == [use]
    report = _check(lambda mesh: program(mesh, True), mesh=4)
    (race,) = report.races
    assert race.kind is Kind.GONE and race.first.operation == "freed"
    assert after == [use], "the program was stopped"
    with pytest.raises(RaceError, match="used after it was freed"):
        report.raise_if_any()


def test_a_watch_raises_where_freed_memory_is_used_and_its_report_says_so() -> None:
    with (
        pytest.raises(RaceError, match="used after it was freed"),
        watch_races(expect_collectives=False) as report,
    ):
        made = torch.ones(8)
        made.untyped_storage().resize_(0)
        made.add_(1)
    assert _kinds(report) == {Kind.GONE}


@pytest.mark.parametrize("read", ["item", "tolist", "numpy", "cpu", "__bool__"])
def test_the_host_waits_where_it_reads(read: str) -> None:
    def program() -> None:
        side, result = cpu.Stream(), torch.zeros(())
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            result += 1
            getattr(result, read)()
        result += 1

    _check(program).raise_if_any()


def test_a_backward_runs_where_its_forward_did_and_autograd_orders_both() -> None:
    def program() -> None:
        side, weight = cpu.Stream(), nn.Parameter(torch.ones(4, 4))
        side.wait_stream(cpu.current_stream())
        with cpu.stream(side):
            hidden = (weight * 2).exp()
        cpu.current_stream().wait_stream(side)
        (hidden * 3).sum().backward()
        weight.grad.add_(1)  # type: ignore[union-attr]  # backward has set it
        side.wait_stream(cpu.current_stream())  # its memory is the side stream's
        weight.grad = None
        del hidden

    report = _check(program)
    report.raise_if_any()
    assert report.operations["stream 2"] >= 4  # two of forward, their two of backward


def test_a_gradient_used_on_a_stream_that_backward_did_not_order_is_reported() -> None:
    def program() -> None:
        side, weight = cpu.Stream(), nn.Parameter(torch.ones(4, 4))
        (weight * 3).sum().backward()
        with cpu.stream(side):
            weight.grad.add_(1)  # type: ignore[union-attr]  # backward has set it
        cpu.current_stream().wait_stream(side)

    (race,) = _check(program).races
    assert race.kind is Kind.ACCESS and race.second.operation == "aten::add_"


def _gather(mesh: Any, async_op: bool) -> tuple[torch.Tensor, Any]:
    output = torch.empty(16)
    return output, gather_into(output, torch.ones(4), mesh.get_group(), async_op)


def test_an_asynchronous_collective_needs_its_wait() -> None:
    def program(mesh: Any, waits: bool) -> None:
        output, work = _gather(mesh, True)
        if waits:
            work.wait()
        output.sum()
        work.wait()

    assert _check(lambda mesh: program(mesh, True), mesh=4).ok
    (race,) = _check(lambda mesh: program(mesh, False), mesh=4).races
    assert race.first.operation == "c10d::_allgather_base_"


def test_a_handle_is_not_over_when_that_is_asked_first_and_then_a_host_that_asked_knows_it() -> (
    None
):
    def program(mesh: Any, times: int) -> None:
        output, work = _gather(mesh, True)
        assert [work.is_completed() for _ in range(times)] == [False, True][:times]
        output.sum()
        work.wait()

    assert _check(lambda mesh: program(mesh, 2), mesh=4).ok
    (race,) = _check(lambda mesh: program(mesh, 1), mesh=4).races
    assert race.first.operation == "c10d::_allgather_base_"


def test_a_handle_keeps_what_its_collective_uses() -> None:
    def program(mesh: Any) -> None:
        _, work = _gather(mesh, True)  # nobody else holds the tensors
        work.wait()

    _check(program, mesh=4).raise_if_any()


def test_a_synchronous_collective_is_in_order_and_every_rank_holds_the_same() -> None:
    def program(mesh: Any) -> None:
        output, work = _gather(mesh, False)
        assert work is None and output.tolist() == [1.0] * 16

    _check(program, mesh=4).raise_if_any()


def test_an_unknown_collective_is_an_error() -> None:
    with torch.library._scoped_library("c10d", "FRAGMENT") as library:
        library.define("races_unknown(Tensor x) -> ()")
        library.impl("races_unknown", lambda x: None, "CPU")
        with pytest.raises(UnknownCollectiveError, match="races_unknown"):
            _check(lambda: torch.ops.c10d.races_unknown(torch.ones(2)))


def test_what_backends_do_when_they_are_waited_for_is_part_of_the_collective() -> None:
    def program() -> None:
        output = torch.empty(4)
        group, op = dist.group.WORLD, dist.ReduceOp.SUM
        assert group is not None, "it was just made"
        work = reduce_scatter_into(output, torch.ones(4), group, op, True)
        assert work is not None
        work.wait()  # gloo copies the result then
        assert output.tolist() == [1.0] * 4

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        _check(program).raise_if_any()
    finally:
        dist.destroy_process_group()


def test_a_mesh_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        _check(lambda mesh: None, mesh=0)
    with pytest.raises(TypeError, match="pass a number of ranks"):
        _check(lambda mesh: None, mesh="2")  # type: ignore[arg-type]  # what it is about
