"""The engine on the asynchronous device: right however late work runs, wrong without its waits.

The programs and the list of waits are those of ``fullshard.preflight.races``. That tool proves
order on a simulation; here the same code really runs late.
"""

from __future__ import annotations

import math

import pytest
import torch

from support.device.pace import Pace, pace_of
from support.pool.messages import Outcome
from support.races.mutations import MUTATIONS, Mutation, mutated
from support.races.on_device import Results, outcome
from support.races.programs import OPTIONS, PROGRAMS
from support.ranks import RanksFailed, run_on_ranks
from support.surface.ranks import everyone

pytestmark = pytest.mark.device

PACES = 20
HYBRID = (2, 2)
IN_ORDER = Pace()


def _equal(found: Results, expected: Results) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def _wrong_paces(name: str, sizes: int | tuple[int, ...], count: int) -> list[int]:
    """The paces at which a program does not give what it gives in order."""
    expected = outcome(name, sizes, IN_ORDER)
    assert all(bool(each.isfinite().all()) for each in expected)
    return [
        number
        for number in range(count)
        if not _equal(outcome(name, sizes, pace_of(number)), expected)
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_delay_changes_a_bit_over_shards(name: str, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--paces")
    assert run_on_ranks(_wrong_paces, 2, name, 2, count, job_timeout=200) == [[], []]


@pytest.mark.parametrize("name", [*OPTIONS, "gather-hooks"])
def test_no_delay_changes_a_bit_over_replicas(name: str, request: pytest.FixtureRequest) -> None:
    count = math.ceil(request.config.getoption("--paces") / 5)
    assert run_on_ranks(_wrong_paces, 4, name, HYBRID, count, job_timeout=200) == [[]] * 4


def _pace_that_shows(mutation: Mutation, count: int) -> int | None:
    """The first pace at which some rank computes something else without the line, if any."""
    sizes = _sizes(mutation)
    expected = outcome(mutation.program, sizes, IN_ORDER)
    with mutated(mutation):
        for number in range(count):
            wrong = not _equal(outcome(mutation.program, sizes, pace_of(number)), expected)
            if any(everyone(wrong)):
                return number
    return None


def _sizes(mutation: Mutation) -> int | tuple[int, ...]:
    if mutation.mesh == HYBRID:
        return HYBRID
    ranks = _ranks(mutation)
    return ranks if isinstance(mutation.mesh, int) else (ranks, 1)


def _ranks(mutation: Mutation) -> int:
    few = mutation.mesh != HYBRID and mutation.program != "post-forward-mesh"
    return 2 if few else 4  # a post-forward mesh of 2 is a part of 4


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if not m.redundant], ids=str)
def test_a_lost_wait_gives_a_wrong_number_or_an_error(mutation: Mutation) -> None:
    try:
        found = run_on_ranks(_pace_that_shows, _ranks(mutation), mutation, PACES, job_timeout=100)
    except RanksFailed as failed:
        assert Outcome.RAISED in {report.outcome for report in failed.reports.values()}, failed
    else:
        assert found[0] is not None


@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.redundant], ids=str)
def test_a_redundant_wait_gives_the_right_numbers(
    mutation: Mutation, request: pytest.FixtureRequest
) -> None:
    count = request.config.getoption("--paces")
    found = run_on_ranks(_pace_that_shows, _ranks(mutation), mutation, count, job_timeout=100)
    assert set(found) == {None}
