"""`--plan` and `--budget`: what is printed, what a budget changes, and what it refuses."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from fullshard_train.cli import main
from fullshard_train.commands import planning
from fullshard_train.commands.planning import Planned, plan_run
from fullshard_train.errors import TrainError
from support.python import run_python
from support.trainer.jobs import TEXT, settings, small_config, small_task


@pytest.fixture
def one_process() -> Iterator[None]:
    """One process for all plans of a test: each new one imports torch."""
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(1, mp_context=context) as alone,
        patch.object(planning, "ProcessPoolExecutor", lambda *_, **__: nullcontext(alone)),
    ):
        yield


def _planned(budget: int | None) -> Planned:
    config = small_config(
        train={"accumulate": 1, "batch": 8},
        parallel={"reshard_after_forward": False},
        model={"layers": 1},
    )
    cpu = torch.device("cpu")
    return plan_run(small_task(config), config, ranks=4, device=cpu, budget=budget)


@pytest.mark.matrix
@pytest.mark.usefixtures("one_process")
def test_a_budget_frees_parameters_or_cuts_the_batch_until_a_step_fits() -> None:
    asked = _planned(None)
    assert not asked.config.parallel.reshard_after_forward
    less = _planned(asked.plan.peak - 1)
    assert less.plan.peak < asked.plan.peak
    changed = less.config.parallel.reshard_after_forward, less.config.train.accumulate
    assert changed != (False, 1)
    with pytest.raises(TrainError, match=r"--budget: the least .* on 4 rank"):
        _planned(1000)


@pytest.mark.matrix
def test_a_run_prints_its_plan_and_then_what_it_measured(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    words = [*settings(train={"accumulate": 1}), "--data", str(tmp_path / "text"), "--plan"]
    printed = run_python("-m", "fullshard_train", *words, "--out", tmp_path / "run")
    assert "at most in a step, on each of 1 ranks" in printed
    found = re.search(r"peak (\S+) MiB measured, (\S+) MiB planned", printed)
    assert found is not None, printed
    assert float(found[1]) == pytest.approx(float(found[2]), rel=0.25)


def test_a_budget_is_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--budget", "much"]) == 2
    assert "--budget 'much' is no size; write" in capsys.readouterr().err
