"""`sample`, `--check-config`, `--timeout` and profiles of chosen steps."""

from __future__ import annotations

import gzip
import json
import tomllib
from pathlib import Path
from unittest import mock

import pytest

from fullshard_train.cli import main
from fullshard_train.reporting.pictures import draw_run
from fullshard_train.settings.config import Config
from support.trainer.jobs import settings, small_config, small_task
from support.trainer.launchers import run_forked


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_a_checked_config_is_printed_with_origins_and_nothing_is_written(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 9\nseed = 5\n")
    words = [*settings(), "--data", str(text), "--config", str(file), "--seed", "6"]
    before = _files(tmp_path)
    assert main([*words, "--out", str(tmp_path / "run"), "--check-config"]) == 0
    assert _files(tmp_path) == before
    printed = capsys.readouterr().out
    config = Config.from_table(tomllib.loads(printed))
    assert (config.train.steps, config.train.seed) == (4, 6)  # the command line goes last
    lines = {line.partition(" = ")[0]: line for line in printed.splitlines()}
    assert lines["beta1"].endswith("# default.toml")
    assert lines["seed"].endswith("# command line")
    small = [*settings(), "--config", str(file), "--data", str(text)]
    assert main([*small, "--check-config"]) == 0
    assert f"seed = 5                                  # {file}" in capsys.readouterr().out
    assert _files(tmp_path) == before


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--set", "train.batch=3", "--mesh", "4"], "must be at least ranks"),
        (["--set", "train.profile_steps=3:9"], "train.profile_steps"),
        (["--set", "train.profile_steps=0:2"], "train.profile_steps"),
        (["--set", "train.profile_steps=2"], "train.profile_steps"),
        (["--set", "run.logger=nowhere"], "run.logger"),
        (["--set", "run.logger=nowhere_at_all:make"], "ModuleNotFoundError"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--timeout", "0"], "must be seconds"),
        (["--timeout", "soon"], "must be seconds"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else None,
)
def test_a_wrong_value_is_told_by_a_check_and_ends_with_two(
    tmp_path: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    wrong: list[str],
    told: str,
) -> None:
    out = tmp_path / "run"
    words = [*settings(train={"accumulate": 1}), "--data", str(text), "--out", str(out)]
    assert main([*words, *wrong, "--check-config"]) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_is_taken_is_told_by_a_check(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    words = [*settings(), "--data", str(text), "--out", str(tmp_path / "run")]
    assert main([*words, "--check-config"]) == 2
    assert "holds something already" in capsys.readouterr().err


@pytest.mark.matrix
def test_a_run_profiles_its_steps_draws_itself_and_is_sampled_from(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = [*settings(train={"profile_steps": "2:3"}), "--data", str(text), "--out", str(out)]
    run_forked(2, words, tmp_path / "output.txt")
    for rank in range(2):
        with gzip.open(out / "profile" / f"rank-{rank}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"step 2", "step 3", "FSDP::all_gather (blocks.0)"} <= names
        assert "step 1" not in names and "step 4" not in names
    assert (out / "run.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "result.json").read_text())
    assert len(result["peak_memory_bytes"]) == 2
    assert "resident set" in result["peak_memory_is_of"]

    written = (out / "sample.txt").read_text()
    capsys.readouterr()
    with mock.patch("torch.distributed.init_process_group", side_effect=AssertionError):
        assert main(["sample", str(out), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == written + "\n"
    for ranks in (2, 3):
        words = ["sample", str(out), "--device", "cpu"]
        assert run_forked(ranks, words, tmp_path / f"sample-{ranks}.txt") == written + "\n"
    assert main(["sample", str(out), "--prompt", "7 times", "--length", "0"]) == 0
    assert capsys.readouterr().out == "7 times\n"
    assert main(["sample", str(out), "--temperature", "-1"]) == 2
    assert "sample.temperature" in capsys.readouterr().err
    assert main(["sample", str(tmp_path)]) == 2
    assert "no checkpoint there" in capsys.readouterr().err


def test_a_run_without_utilisation_is_drawn_with_what_there_is(tmp_path: Path) -> None:
    records = [
        {
            "kind": "train",
            "step": step,
            "learning_rate": 1e-3,
            "gradient_norm": None if step == 2 else 1.0,
            "items_per_second": 10.0,
            "peak_memory_mib": 3.0,
        }
        for step in (1, 2, 3)
    ]
    task = small_task(small_config())
    draw_run(tmp_path / "run.png", records, task)
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
