"""The learning rate over a run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fullshard_train.settings.config import load_config
from fullshard_train.training.schedule import learning_rate

OPTIM = replace(load_config([], []).optim, learning_rate=2.0, final_fraction=0.25, warmup_steps=4)


def test_it_rises_in_equal_parts_and_peaks_at_the_end_of_the_warm_up() -> None:
    rates = [learning_rate(OPTIM, step=step, steps=20) for step in range(4)]
    assert rates == [0.5, 1.0, 1.5, 2.0]


def test_it_falls_as_half_a_cosine_to_its_final_fraction() -> None:
    steps = 20
    for step in range(4, steps):
        progress = (step - 3) / 16
        expected = 0.5 + 1.5 * (1 + math.cos(math.pi * progress)) / 2
        assert learning_rate(OPTIM, step=step, steps=steps) == pytest.approx(expected)
    assert learning_rate(OPTIM, step=steps - 1, steps=steps) == pytest.approx(0.5)


@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 50])
def test_it_is_positive_and_never_above_the_peak_for_any_warm_up(warmup_steps: int) -> None:
    optim = replace(OPTIM, warmup_steps=warmup_steps)
    rates = [learning_rate(optim, step=step, steps=5) for step in range(5)]
    assert all(0 < rate <= 2.0 for rate in rates)
