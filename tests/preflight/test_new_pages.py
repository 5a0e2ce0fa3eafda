"""What a step pays for new memory pages: its allocations in order, and what they cost here."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fullshard.preflight import Here, plan
from fullshard.preflight.costs import here as measuring
from fullshard.preflight.costs.host import HostTime
from fullshard.preflight.costs.kernels import Kernel
from fullshard.preflight.costs.pages import Allocations, time_new_pages
from fullshard.preflight.costs.ranks import Job, Times, measure_together

MIB = 2**20


def _allocations(before: list[tuple[int, int]], step: list[tuple[int, int]]) -> Allocations:
    found = Allocations()
    for each in before:
        found.changed(*each)
    found.restart()
    for each in step:
        found.changed(*each)
    return found


def test_what_came_before_a_step_is_kept_in_its_order() -> None:
    found = _allocations([(1, 10), (2, 20), (1, 0)], [(3, 5), (3, 0)])
    assert found.before == [(1, 10), (2, 20), (1, 0)]
    assert found.step == [(3, 5), (3, 0)]


def test_the_most_that_is_alive_at_once_counts_what_is_resized_once() -> None:
    assert (
        _allocations([(1, 10), (2, 20)], [(1, 0), (2, 25), (3, 10), (3, 0), (2, 20)]).most() == 35
    )


def test_steps_of_equal_sizes_in_equal_order_are_measured_once() -> None:
    one = _allocations([(1, 10)], [(2, 20), (2, 0)])
    same = _allocations([(1, 10)], [(7, 20), (7, 0)])
    other = _allocations([(1, 10)], [(2, 0), (2, 20)])
    assert str(one) == str(same) != str(other)


def test_a_step_that_keeps_its_memory_pays_nothing() -> None:
    assert time_new_pages(_allocations([(1, MIB)], [])) == 0.0


@pytest.mark.matrix
def test_a_step_that_gives_memory_back_to_the_system_pays_for_each_page() -> None:
    large = 64 * MIB  # the C library maps such an allocation by itself, and unmaps it
    job = Job(ranks=1, threads=1, world=1, allocations=_allocations([], [(1, large), (1, 0)]))
    pages = large // 4096
    assert measure_together(job).pages / pages > 1e-8, "no page is had in ten nanoseconds"


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).square().mean()
    return found


@pytest.fixture(scope="module")
def jobs() -> dict[float, tuple[list[Job], float]]:
    """What a plan asked to be measured, and its step's seconds, by what pages were said to take."""
    found = {}
    for pages in (0.0, 1000.0):
        asked: list[Job] = []

        def measured(job: Job, asked: list[Job] = asked, pages: float = pages) -> Times:
            asked.append(replace(job))
            host = HostTime(0.0, 0.0) if job.parameters else None
            return Times([1.0] * len(job.calls), [], host, pages)

        with (
            patch.object(measuring, "measure_together", measured),
            patch("fullshard.preflight.costs.memo._kept", {}),
        ):
            made = plan(
                lambda: nn.Linear(256, 256),
                torch.empty(4, 256),
                _loss,
                mesh=1,
                device=Here(threads=1),
            )
        assert made.step_time is not None
        found[pages] = (asked, made.step_time)
    return found


def test_a_plans_step_has_what_new_pages_take(
    jobs: dict[float, tuple[list[Job], float]],
) -> None:
    assert jobs[1000.0][1] - jobs[0.0][1] == pytest.approx(1000.0)


def test_a_plan_follows_what_its_step_allocates(
    jobs: dict[float, tuple[list[Job], float]],
) -> None:
    (allocations,) = [each.allocations for each in jobs[0.0][0] if each.allocations is not None]
    weight = 256 * 256 * 4
    assert weight in [nbytes for _, nbytes in allocations.before], "the parameter, made before"
    freed = [number for number, nbytes in allocations.step if nbytes == 0]
    assert weight in [nbytes for number, nbytes in allocations.step if number in freed], (
        "a gradient"
    )


def test_a_step_too_large_to_try_is_planned_without_new_pages() -> None:
    costs = measuring.MeasuredCosts(Here(threads=1), (1,))
    kernel = Kernel("aten::view", 0, 0, torch.float32)
    huge = _allocations([(1, 2**60)], [])
    asked: list[Job] = []

    def measured(job: Job) -> Times:
        asked.append(job)
        return Times([1.0] * len(job.calls), [], HostTime(0.0, 0.0), 5.0)

    with (
        patch.object(measuring, "measure_together", measured),
        patch("fullshard.preflight.costs.memo._kept", {}),
    ):
        costs.measure([kernel], [], 1, huge)
    assert all(each.allocations is None for each in asked)
    assert costs.kernel(kernel) == 0.0
