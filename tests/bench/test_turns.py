"""Measurements that take turns: one at a time, in order, and nobody waits for one that is gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bench.measured import settings
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.job import Job
from fullshard_bench.launching.launch import run_jobs
from fullshard_bench.launching.turns import RingTurn, ring, share_core
from fullshard_bench.running.run import Run


@contextmanager
def turns_of(count: int) -> Iterator[list[tuple[RingTurn, list[int]]]]:
    """As many turns, each with ends of pipes of its own, as processes have."""
    owned: list[list[int]] = []
    try:
        with ring(count) as pipes:
            owned = [[os.dup(end) for end in ends] for ends in pipes]
        yield [
            (RingTurn(incoming, outgoing, place, count), ends)
            for place, ends in enumerate(owned)
            for incoming, outgoing in [ends]
        ]
    finally:
        for ends in owned:
            end_of(ends)


def end_of(ends: list[int]) -> None:
    """What the end of a process does."""
    while ends:
        os.close(ends.pop())


def play(turn: RingTurn, ends: list[int], name: int, turns: int, seen: list[str]) -> None:
    """As many turns, written down when they begin and end; then nothing more is heard."""
    for _ in range(turns):
        with turn:
            seen.append(f"{name} begins")
            seen.append(f"{name} ends")
    end_of(ends)


def all_play(run: Callable[[RingTurn, list[int], int], None]) -> None:
    """Three threads at once, each with its turn and its number."""
    with turns_of(3) as turns:
        players = [
            threading.Thread(target=run, args=(*turn, name)) for name, turn in enumerate(turns)
        ]
        for player in reversed(players):
            player.start()
        for player in players:
            player.join()


@pytest.mark.timeout(30)
def test_turns_go_round_and_nobody_plays_in_anothers() -> None:
    seen: list[str] = []
    all_play(lambda turn, ends, name: play(turn, ends, name, 4, seen))
    assert seen == [f"{name} {what}" for name in (0, 1, 2) for what in ("begins", "ends")] * 4


@pytest.mark.timeout(30)
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_nobody_waits_for_one_that_is_gone(gone: int) -> None:
    seen: list[str] = []
    all_play(lambda turn, ends, name: play(turn, ends, name, 1 if name == gone else 4, seen))
    assert [seen.count(f"{name} ends") for name in range(3)] == [
        1 if name == gone else 4 for name in range(3)
    ]


@pytest.mark.timeout(30)
def test_each_round_begins_with_another_process() -> None:
    seen: list[int] = []

    def play_rounds(turn: RingTurn, ends: list[int], name: int) -> None:
        for number in range(6):
            with turn.round(number):
                for _ in range(2):
                    with turn:
                        seen.append(name)
        end_of(ends)

    all_play(play_rounds)
    rounds = [seen[at : at + 6] for at in range(0, len(seen), 6)]
    assert rounds == [[0, 1, 2] * 2, [1, 2, 0] * 2, [2, 0, 1] * 2] * 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_who_takes_turns_keeps_to_one_core() -> None:
    before = os.sched_getaffinity(0)
    try:
        share_core()
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


def wide(model: str = "many:groups=2,width=8", steps: int = 10) -> Job:
    """One rank of a wide world that the plain model trains in."""
    return Job(
        settings=settings(model=model, impl=("none",), steps=steps),
        kind="wide",
        mesh="8",
        trace=False,
    )


@pytest.mark.matrix
def test_rounds_of_wide_worlds_are_made_in_turns() -> None:
    rounds: list[int] = []
    found = run_jobs([wide(), wide()], lambda what, done, of: rounds.append(done if of else 0))
    timed = [done for done in rounds if done]
    assert sorted(timed) == sorted([*range(1, 11), *range(1, 11)])
    ahead = [_spread(timed[: at + 1]) for at in range(len(timed))]
    assert max(ahead) <= 5  # mostly 1; lines may be read late; one after the other it would be 10
    figures = [result.point.entries[0].figures for result in found]
    assert [each is not None and len(each.step_ms) for each in figures] == [10, 10]


def _spread(timed: list[int]) -> int:
    """How far one measurement is ahead of the other: the rounds that only one has made."""
    return len(set(timed)) - (len(timed) - len(set(timed)))


@pytest.mark.slow
def test_one_that_gives_up_ends_the_others() -> None:
    bad = wide(model="nowhere:nothing")
    with pytest.raises(BenchError, match="nowhere"):
        run_jobs([wide(steps=100_000), bad], lambda *_: None)


def test_wide_worlds_of_one_run_take_turns_on_the_cpu_only() -> None:
    for device, counts in (("cpu", [1, 1, 3]), ("cuda", [1, 1, 1, 1, 1])):
        run = Run(
            name="any", settings=settings(device=device), meshes=("1", "2"), wide=(8, 64, 512)
        )
        assert [len(jobs) for jobs in run.jobs()] == counts
        assert run.takes_turns == (device == "cpu")
    assert not Run(name="any", settings=settings(), wide=(8,)).takes_turns
