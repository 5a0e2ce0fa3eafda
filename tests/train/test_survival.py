"""A run that is killed again and again ends as one that nobody disturbs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from train.launchers import Forked, Launcher, Torchrun
from train.survival import survive


@pytest.mark.parametrize(
    ("launcher", "kills"),
    [
        pytest.param(Forked, 2, id="2 kills"),
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
