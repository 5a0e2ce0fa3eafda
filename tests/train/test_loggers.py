"""A logger of the user's: what it gets, and that a run outlives it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fullshard_train.cli import main
from fullshard_train.errors import TrainError
from fullshard_train.reporting import loggers
from fullshard_train.reporting.loggers import LoggedRun, find_logger, start_logger
from fullshard_train.reporting.metrics import read_metrics
from support.members import ROOT
from support.trainer.jobs import losses, settings
from support.trainer.launchers import run_forked

RUN = LoggedRun(folder=Path("run"), config={"train": {"steps": 4}}, step=0, ranks=2)

# Raises at the third record.
FAILING = """
class Failing:
    def __init__(self, run):
        self.got = []
    def write(self, record):
        self.got.append(record)
        if len(self.got) == 3:
            raise ConnectionError("the service is down")
    def close(self):
        raise AssertionError("closed after it failed")

class Hanging(Failing):
    def write(self, record):
        import threading
        threading.Event().wait()

def broken(run):
    raise ConnectionError("no account")

def nothing(run):
    return None
"""


class Kept:
    """A logger that keeps what it gets, for all runs."""

    got: list[Mapping[str, Any]]
    closed = 0

    def __init__(self, run: LoggedRun) -> None:
        self.got = []
        self.run = run
        Kept.last = self

    last: Kept

    def write(self, record: Mapping[str, Any]) -> None:
        self.got.append(record)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of failing loggers."""
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    return "failing"


def test_a_logger_gets_what_the_metrics_file_gets(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = [*settings(run={"logger": f"{__name__}:Kept"}), "--data", str(text)]
    assert main([*words, "--out", str(out)]) == 0
    logger = Kept.last
    assert logger.got == read_metrics(out / "metrics.jsonl")
    assert logger.closed == 1
    assert (logger.run.folder, logger.run.step, logger.run.ranks) == (out, 0, 1)
    assert logger.run.config["train"]["steps"] == 4


@pytest.mark.matrix
def test_a_logger_that_raises_is_dropped_and_the_ranks_train_on(
    text: Path, tmp_path: Path, failing: str
) -> None:
    out = tmp_path / "run"
    words = [*settings(run={"logger": f"{failing}:Failing"}), "--data", str(text)]
    said = run_forked(2, [*words, "--out", str(out)], tmp_path / "output.txt")
    assert said.count("raised in write: ConnectionError: the service is down") == 1
    assert list(losses(read_metrics(out / "metrics.jsonl"))) == [1, 2, 3, 4]


@pytest.mark.matrix
def test_a_logger_that_hangs_holds_no_rank(text: Path, tmp_path: Path, failing: str) -> None:
    out = tmp_path / "run"
    run = {"logger": f"{failing}:Hanging", "logger_patience": 0.5}
    words = [*settings(run=run), "--data", str(text), "--out", str(out)]
    said = run_forked(2, words, tmp_path / "output.txt")
    assert said.count("has not taken all records and closed within 0.5 seconds") == 1
    assert (out / "model.safetensors").is_file()


def test_a_logger_that_falls_far_behind_gets_nothing_more(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "_BEHIND", 3)
    go_on, taken = threading.Event(), threading.Event()

    class Slow:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def write(self, record: Mapping[str, Any]) -> None:
            taken.set()
            go_on.wait()
            self.got.append(record["step"])

        def close(self) -> None:
            self.got.append("closed")

    slow = Slow()
    sink = loggers.Forgiving("slow", slow, patience=60.0)
    sink.write({"step": 0})
    assert taken.wait(60)
    for step in range(1, 6):
        sink.write({"step": step})
    assert capfd.readouterr().err.count("the logger slow is 3 records behind; it gets") == 1
    go_on.set()
    sink.close()
    assert "closed" not in slow.got


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("broken", "ConnectionError: no account"),
        ("nothing", "which has no write()"),
        ("missing", "AttributeError"),
        ("__doc__", "is no function"),
    ],
)
def test_a_logger_that_cannot_be_made_is_told_before_training(
    failing: str, name: str, told: str
) -> None:
    with pytest.raises(TrainError) as raised:
        start_logger(f"{failing}:{name}", RUN, patience=60.0)
    assert told in str(raised.value) and f"'{failing}:{name}'" in str(raised.value)


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(TrainError, match=r"'nowhere_at_all:make': ModuleNotFoundError"):
        find_logger("nowhere_at_all:make")


def test_the_example_for_weights_and_biases_makes_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # wandb's init, log and finish, as its documentation has them.
    (tmp_path / "wandb.py").write_text(
        "calls = []\n"
        "class Run:\n"
        "    id = 'abc'\n"
        "    def log(self, values, step): calls.append(('log', step, values))\n"
        "    def finish(self): calls.append(('finish',))\n"
        "def init(**options):\n"
        "    calls.append(('init', options))\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples" / "loggers")
    folder = tmp_path / "run"
    folder.mkdir()
    run = LoggedRun(folder=folder, config={"train": {"steps": 4}}, step=0, ranks=2)
    for _ in range(2):  # the second time as a run that is resumed
        sink = start_logger("wandb_logger:make", run, patience=60.0)
        sink.write({"kind": "train", "step": 1, "loss": 2.0})
        sink.close()
    calls: list[tuple[Any, ...]] = sys.modules["wandb"].__dict__["calls"]
    inits = [call[1] for call in calls if call[0] == "init"]
    assert [options["id"] for options in inits] == [None, "abc"]
    assert inits[0]["config"] == {"train": {"steps": 4}}
    assert calls[1:3] == [("log", 1, {"train/loss": 2.0}), ("finish",)]


def test_the_example_for_tensorboard_writes_points_that_it_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the optional extra tensorboard is not installed",
    )
    monkeypatch.syspath_prepend(ROOT / "examples" / "loggers")
    run = LoggedRun(folder=tmp_path, config={"train": {"steps": 4}}, step=0, ranks=1)
    sink = start_logger("tensorboard_logger:make", run, patience=60.0)
    sink.write({"kind": "train", "step": 3, "loss": 2.0})
    sink.close()
    found = events.EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(point.step, point.value) for point in found.Scalars("train/loss")] == [(3, 2.0)]
