"""Ranks are lost while a group joins, and a lighthouse while groups train, in real runs.

A group that goes on has the state of a replay, to the bit, or its process ended with an error.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.elastic.check import check_against_replay
from support.elastic.moments import MOMENTS
from support.elastic.records import read_records
from support.elastic.run import ElasticRun, JoinFault

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="replica groups need torchft")

TWO = {"a": 1, "b": 2}
THREE = {"a": 1, "b": 2, "c": 1}


def started(folder: Path, ranks: dict[str, int]) -> ElasticRun:
    run = ElasticRun(folder, ranks)
    for group in ranks:
        run.start(group)
    while not run.together(3):
        run.follow()
    return run


def strike(folder: Path, ranks: dict[str, int], faults: list[JoinFault]) -> None:
    with started(folder, ranks) as run:
        for fault in faults:
            run.fail_join(fault)
        run.finish()
    assert run.restarts >= len(faults), run.log  # each fault ended a rank
    check_against_replay(folder, ranks)


@pytest.mark.parametrize(
    ("ranks", "faults"),
    [
        (TWO, [("source", 1), ("joiner", 0), ("source", 4)]),
        (THREE, [("source", 1), ("third", 4), ("joiner", 5)]),
    ],
)
def test_a_rank_that_is_lost_during_a_join_changes_no_bit(
    tmp_path: Path, ranks: dict[str, int], faults: list[tuple[str, int]]
) -> None:
    named = [JoinFault(joiner="b", victim=victim, moment=MOMENTS[at]) for victim, at in faults]
    strike(tmp_path, ranks, named)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["source", "joiner", "third"])
@pytest.mark.parametrize("joiner", ["a", "b"])
@pytest.mark.parametrize("ranks", [TWO, THREE])
def test_a_rank_that_is_lost_at_any_moment_of_a_join_changes_no_bit(
    tmp_path: Path, ranks: dict[str, int], joiner: str, victim: str
) -> None:
    if len(ranks) == 2 and victim == "third":
        pytest.skip("two groups have no third one")
    named = [JoinFault(joiner=joiner, victim=victim, moment=moment) for moment in MOMENTS]
    strike(tmp_path, ranks, named)


def drawn(folder: Path, seed: int, faults: int) -> None:
    generator = random.Random(seed)
    ranks = generator.choice((TWO, THREE))
    strike(folder, ranks, [JoinFault.drawn(generator, ranks) for _ in range(faults)])


@pytest.mark.parametrize("seed", range(2))
def test_joins_that_fail_at_random_moments_change_no_bit(tmp_path: Path, seed: int) -> None:
    drawn(tmp_path, seed, faults=2)


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_joins_that_fail_at_random_moments_change_no_bit(tmp_path: Path, seed: int) -> None:
    drawn(tmp_path, seed, faults=10)


def test_groups_wait_for_a_lighthouse_that_is_killed_and_started_again(tmp_path: Path) -> None:
    with started(tmp_path, THREE) as run:
        run.restart_lighthouse()
        run.meet_again()
        assert run.restarts == 0, run.log
        run.fail_join(JoinFault(joiner="c", victim="joiner", moment=MOMENTS[-1]))
        run.finish()
    check_against_replay(tmp_path, THREE)
    assert any(record.joined and record.group == "c" for record in read_records(tmp_path))
