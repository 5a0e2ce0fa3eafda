"""Metrics files: appending, reading back, cutting."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from fullshard_train.errors import TrainError
from fullshard_train.reporting.metrics import (
    JsonLines,
    SeveralSinks,
    TensorBoard,
    keep_until,
    read_metrics,
    require_tensorboard,
)


def _write(path: Path, steps: range) -> None:
    sink = JsonLines(path)
    for step in steps:
        sink.write({"kind": "train", "step": step, "loss": step / 3})
    sink.close()


def test_a_second_writer_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 3))
    _write(path, range(3, 5))
    records = read_metrics(path)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["loss"] for record in records] == [step / 3 for step in range(1, 5)]


def test_a_line_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write({"kind": "train", "step": 1, "loss": 2.0})
    assert [record["step"] for record in read_metrics(path)] == [1]
    sink.close()


def test_numbers_that_are_not_finite_are_null_as_json_has_no_word_for_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    sink.write({"kind": "train", "step": 1, "loss": math.nan, "gradient_norm": math.inf})
    sink.close()
    assert path.read_text() == '{"kind": "train", "step": 1, "loss": null, "gradient_norm": null}\n'
    keep_until(path, path, 1)
    assert read_metrics(path) == [{"kind": "train", "step": 1, "loss": None, "gradient_norm": None}]


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, range(1, 3))
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_a_resumed_run_keeps_what_came_before_its_checkpoint(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other.jsonl"
    _write(path, range(1, 6))
    keep_until(path, other, 3)
    keep_until(path, path, 2)
    assert [record["step"] for record in read_metrics(other)] == [1, 2, 3]
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    keep_until(tmp_path / "gone.jsonl", path, 9)
    assert read_metrics(path) == []


def _with_tensorboard(folder: Path, steps: range, *, done: int) -> None:
    sink = SeveralSinks([JsonLines(folder / "metrics.jsonl"), TensorBoard(folder, step=done)])
    for step in steps:
        sink.write({"kind": "train", "step": step, "loss": step / 4})
        sink.write({"kind": "held_out", "step": step, "loss": step / 8, "accuracy": 0.5})
    sink.close()


# TensorBoard's own imports warn, depending on what else is installed.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_number_and_not_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the optional extra tensorboard is not installed",
    )
    _with_tensorboard(tmp_path, range(1, 6), done=0)
    _with_tensorboard(tmp_path, range(4, 7), done=3)
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "held_out/loss", "held_out/accuracy"}
    curve = {event.step: event.value for event in events.Scalars("train/loss")}
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 7))
    assert curve == {step: step / 4 for step in range(1, 7)}
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 16


def test_a_missing_tensorboard_is_said_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrainError, match=r"pip install 'fullshard-train\[tensorboard\]'"):
        require_tensorboard()
