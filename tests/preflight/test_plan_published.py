"""A plan's time compared with published training runs."""

from __future__ import annotations

import pytest

from support.published import RUNS


@pytest.mark.matrix  # models of billions of parameters: a minute and more each
@pytest.mark.parametrize("name", RUNS)
def test_a_step_on_h100_takes_within_15_percent_of_what_was_published(name: str) -> None:
    run = RUNS[name]
    seconds = run.planned().step_time
    assert seconds is not None
    speed = run.rows * run.tokens / seconds
    print(f"{name}: planned {speed:.0f}, published {run.speed:.0f}: {speed / run.speed:.3f}")
    assert speed / run.speed == pytest.approx(1.0, abs=0.15)
