"""A run that is killed again and again ends as one that nobody disturbs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from fullshard_train.cli import main
from fullshard_train.reporting.metrics import read_metrics
from support.trainer.drill import STEPS, drill
from support.trainer.hosts import NoHosts
from support.trainer.jobs import losses, settings
from support.trainer.launchers import Forked, Launched, Launcher, Torchrun, run_forked, send, until
from support.trainer.survival import survive


@pytest.mark.parametrize(
    ("launcher", "kills"),
    [
        pytest.param(Forked, 2, marks=pytest.mark.matrix, id="2 kills"),
        pytest.param(
            Torchrun,
            20,
            marks=[pytest.mark.matrix, pytest.mark.timeout(1800)],
            id="20 kills under torchrun",
        ),
    ],
)
def test_a_run_killed_at_random_moments_ends_as_an_undisturbed_one(
    tmp_path: Path, launcher: Launcher, kills: int
) -> None:
    report = survive(tmp_path, seed=11, kills=kills, launcher=launcher)
    assert len(report.kills) == kills
    assert {kill.number for kill in report.kills} == {signal.SIGTERM, signal.SIGKILL}
    assert report.differing_losses == []
    assert report.differing_weights == []
    assert report.final[0] == report.final[1]


def _curves(folder: Path) -> dict[str, dict[int, float]]:
    records = read_metrics(folder / "metrics.jsonl")
    return {kind: losses(records, kind) for kind in ("train", "held_out")}


@pytest.mark.matrix
def test_a_rank_killed_in_mid_step_ends_the_others_and_fewer_ranks_go_on(
    text: Path, tmp_path: Path
) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    words = [*settings(train={"steps": 60, "accumulate": 1}), "--data", str(text)]
    with Forked(3, [*words, "--out", str(run)], tmp_path / "killed.txt") as job:
        until(run / "metrics.jsonl", 11, job)
        send(job.ranks()[1], signal.SIGKILL)
        assert job.wait(60) != 0  # nobody is left waiting
        assert 0 not in job.codes()
    run_forked(2, [*words, "--resume", "auto", "--out", str(run)], tmp_path / "again.txt")
    assert main([*words, "--out", str(alone)]) == 0
    found, expected = _curves(run), _curves(alone)
    for kind, curve in expected.items():
        assert found[kind] == pytest.approx(curve, rel=1e-4), kind


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_torchrun_starts_all_ranks_again_after_one_is_lost_and_losses_are_equal(
    text: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run, whole, output = tmp_path / "run", tmp_path / "whole", tmp_path / "a.txt"
    words = [*settings(train={"steps": 60}, checkpoint={"every": 5}), "--data", str(text)]
    resumed = [*words, "--resume", "auto", "--out", str(run)]
    with Launched(2, resumed, output, ["--max-restarts=1"]) as job:
        until(run / "metrics.jsonl", 23, job)
        send(job.ranks()[1], number)
        assert job.wait(240) == 0, output.read_text()
    assert output.read_text().count("over 2 rank(s)") == 2
    with Launched(2, [*words, "--out", str(whole)], tmp_path / "b.txt") as undisturbed:
        assert undisturbed.wait(240) == 0, (tmp_path / "b.txt").read_text()
    assert _curves(run) == _curves(whole)


@pytest.mark.matrix
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_saves_and_its_code_says_which(
    text: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run, output = tmp_path / "run", tmp_path / "output.txt"
    words = [*settings(train={"steps": 100000}), "--data", str(text), "--out", str(run)]
    with Launched(2, words, output) as job:
        until(run / "metrics.jsonl", 3, job)
        job.signal(number)
        assert job.wait(120) == code, output.read_text()
    said = output.read_text()
    assert f"{number.name}: saved after step" in said
    assert "Traceback" not in said


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_run_outlives_a_host_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    try:
        found = drill(tmp_path, tell=lambda line: print(line, file=sys.stderr))
    except NoHosts as error:
        pytest.skip(str(error))
    assert 100 < found.lost < found.back < STEPS
    assert found.found.keys() == found.expected.keys()
    assert found.furthest < 1e-5  # sums come in another order on one rank than on two
