"""The image classifier: its data, its baselines, and training against the unsharded model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.dummy import DummyClassifier  # type: ignore[import-untyped]
from sklearn.neighbors import NearestCentroid  # type: ignore[import-untyped]

from fullshard_train.cli import main
from fullshard_train.digits.task import DigitsTask, read_digits
from fullshard_train.errors import TrainError
from fullshard_train.reporting.metrics import read_metrics
from fullshard_train.settings.config import load_config
from support.trainer.jobs import (
    assert_trains_as_unsharded,
    small_config,
)

SMALL_DIGITS: Mapping[str, Mapping[str, Any]] = {
    "run": {"task": "digits"},
    "digits": {"channels": 3, "layers": 2, "width": 12, "heads": 2},
}


@pytest.fixture(scope="module")
def task() -> DigitsTask:
    """The task of the committed config, with all that is held out."""
    config = load_config([Path("digits.toml")], ["train.batch=60"])
    return DigitsTask(config, torch.frombuffer(bytearray(read_digits()), dtype=torch.uint8))


def test_each_image_is_either_learned_or_judged_and_an_epoch_has_each_once(
    task: DigitsTask,
) -> None:
    images = load_digits().images / 16
    everything = sorted(image.tobytes() for image in images.astype(np.float32))
    judged = task.evaluation_rows(range(task.held_out_rows))
    count = len(images) - task.held_out_rows
    epochs = []
    for epoch in range(2):
        numbers = range(epoch * count, (epoch + 1) * count)
        rows = [task.training_rows(n // 60, range(n % 60, n % 60 + 1)).inputs[0] for n in numbers]
        both = [*rows, *judged.inputs]
        assert sorted(image.numpy().tobytes() for image in both) == everything
        epochs.append(torch.stack(rows))
    assert not epochs[0].equal(epochs[1])
    assert abs(task.held_out_rows - len(images) / 5) < 1


def test_the_images_keep_their_digits(task: DigitsTask) -> None:
    found = load_digits()
    digit_of = {
        image.astype(np.float32).tobytes(): int(digit)
        for image, digit in zip(found.images / 16, found.target, strict=True)
    }
    for batch in (task.training_rows(3, range(60)), task.evaluation_rows(range(200))):
        for image, digit in zip(batch.inputs, batch.targets, strict=True):
            assert digit_of[image.numpy().tobytes()] == int(digit)


@pytest.mark.filterwarnings("ignore:self.within_class_std_dev_:UserWarning")
def test_the_baselines_are_those_of_scikit_learn(task: DigitsTask) -> None:
    steps = -(-1437 // 60)
    rows = [task.training_rows(step, range(60)) for step in range(steps)]
    count = len(load_digits().images) - task.held_out_rows
    inputs = torch.cat([batch.inputs for batch in rows]).flatten(1)[:count].numpy()
    targets = torch.cat([batch.targets for batch in rows])[:count].numpy()
    judged = task.evaluation_rows(range(task.held_out_rows))
    expected = {
        name: classifier.fit(inputs, targets).score(
            judged.inputs.flatten(1).numpy(), judged.targets.numpy()
        )
        for name, classifier in (
            ("majority class", DummyClassifier(strategy="most_frequent")),
            ("nearest centroid", NearestCentroid()),
        )
    }
    assert task.baselines() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_training_equals_training_the_unsharded_model(tmp_path: Path, world_size: int) -> None:
    assert_trains_as_unsharded(small_config(**SMALL_DIGITS), world_size, tmp_path)


def test_nothing_held_out_is_refused() -> None:
    config = load_config([Path("digits.toml")], ["digits.held_out_every=5000"])
    data = torch.frombuffer(bytearray(read_digits()), dtype=torch.uint8)
    with pytest.raises(TrainError, match=r"digits\.held_out_every = 5000: holds out none of 1797"):
        DigitsTask(config, data)


@pytest.mark.matrix
def test_the_committed_config_beats_its_baselines_after_a_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--config", "digits.toml", "--steps", "75", "--out", "run"]) == 0
    printed = capfd.readouterr().out
    result: dict[str, Any] = json.loads(Path("run/result.json").read_text())
    assert result["judged_by"] == "held-out accuracy"
    assert result["held_out_accuracy"] > max(result["baselines"].values())
    assert f"held-out accuracy  {result['held_out_accuracy']:.4f} of the images\n" in printed
    evaluations = [r for r in read_metrics(Path("run/metrics.jsonl")) if r["kind"] == "held_out"]
    assert [record["step"] for record in evaluations] == [25, 50, 75]
    assert evaluations[-1]["accuracy"] == result["held_out_accuracy"]
    sample = Path("run/sample.txt").read_text()
    assert sample.count(" is ") == 9
