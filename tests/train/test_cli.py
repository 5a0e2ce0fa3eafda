"""The command line, from a user's seat: what a run leaves behind, and what an error looks like."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard_train import cli
from fullshard_train.checkpoints.checkpoint import read_position, resolve
from fullshard_train.checkpoints.store import CheckpointStore, verify
from fullshard_train.cli import main
from fullshard_train.commands.parsers import COMMANDS, build_parser
from fullshard_train.commands.plan import make_plan
from fullshard_train.reporting.metrics import read_metrics
from fullshard_train.settings.config import Config, read_table
from support.python import environment
from support.trainer.jobs import TEXT, damage, losses, settings, untimed
from support.trainer.launchers import Forked, send, until


def _launched(ranks: int, arguments: list[str]) -> subprocess.Popen[str]:
    launcher = ["-m", "fullshard_train", "launch", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [sys.executable, *launcher, "--", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 143])
def test_the_program_leaves_with_what_main_returns(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    left: list[int] = []
    monkeypatch.setattr(cli, "main", lambda arguments, prog: code)
    monkeypatch.setattr(os, "_exit", left.append)
    cli.run()
    assert left == [code]


def test_a_launched_run_leaves_all_its_files_and_says_where(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    job = _launched(2, [*settings(), "--data", str(text), "--out", str(out)])
    printed, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    for name in (
        "config.toml",
        "metrics.jsonl",
        "model.safetensors",
        "loss.png",
        "sample.txt",
        "result.json",
    ):
        assert (out / name).stat().st_size > 0, name
        assert printed.count(str(out / name)) == 1, printed
    checkpoint = out / "checkpoints" / "step-00000004"
    verify(checkpoint)
    assert str(checkpoint) in printed
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "result.json").read_text())
    for name, value in {"held-out loss": result["held_out_loss"], **result["baselines"]}.items():
        assert f"{name:<15}  {value:.4f} nats per byte" in printed
    assert list(losses(read_metrics(out / "metrics.jsonl"))) == [1, 2, 3, 4]
    # One bar, on one rank.
    assert errors.count("step 4/4") == 1
    assert Config.from_table(read_table(out / "config.toml")).data.source == str(text)


@pytest.mark.matrix
def test_a_launched_run_ends_with_how_to_continue_after_ctrl_c(tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    words = [*settings(), "--data", str(text), "--out", str(run), "--steps", "1000000"]
    job = _launched(1, words)
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and losses(read_metrics(metrics))):
        assert job.poll() is None
    job.send_signal(signal.SIGINT)
    printed, errors = job.communicate(timeout=60)
    assert job.returncode == 128 + signal.SIGINT
    assert printed.endswith(f"continue, started as before, with --resume {run}\n")
    assert "Traceback" not in errors


@pytest.mark.matrix
def test_a_launched_run_ends_with_what_rank_0_says_of_an_error(tmp_path: Path) -> None:
    job = _launched(1, ["--steps", "0", "--out", str(tmp_path)])
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 2
    assert (
        "fullshard_train: error: config train.steps = 0: must be greater than or equal to 1\n"
        in errors
    )
    assert "Traceback" not in errors


def test_the_last_word_of_the_command_line_wins(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[train]\nseed = 3\nsteps = 8\n")
    (tmp_path / "b.toml").write_text("[train]\nseed = 4\n")
    files = ["--config", str(tmp_path / "a.toml"), "--config", str(tmp_path / "b.toml")]

    def planned(*words: str) -> Config:
        return make_plan(build_parser().parse_args([*files, *words])).config

    assert planned("--steps", "5", "--set", "train.steps=6").train.steps == 6
    assert planned("--set", "train.steps=6", "--steps", "5").train.steps == 5
    assert (planned().train.seed, planned().train.steps) == (4, 8)


def test_an_error_is_told_by_rank_0_alone_and_fails_every_rank(tmp_path: Path) -> None:
    # Without a launcher, which would end the slower rank, so that each has its own exit code.
    output, run = tmp_path / "output", tmp_path / "run"
    with Forked(2, ["--steps", "0", "--out", str(run)], output) as job:
        assert job.wait(120) == 2
    assert job.codes() == [2, 2]
    line = "fullshard_train: error: config train.steps = 0: must be greater than or equal to 1\n"
    assert output.read_text() == line
    assert not run.exists()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.matrix)]
)
def test_a_signal_to_one_rank_saves_and_ends_every_rank_with_its_code(
    tmp_path: Path, text: Path, number: signal.Signals
) -> None:
    output, run = tmp_path / "output", tmp_path / "a run"
    words = [*settings(), "--data", str(text), "--out", str(run), "--steps", "1000000"]
    metrics = run / "metrics.jsonl"
    with Forked(2, words, output) as job:
        until(metrics, 1, job)
        send(job.ranks()[1], number)
        assert job.wait(120) == 128 + number
    assert job.codes() == [128 + number] * 2
    checkpoint = resolve(run)
    verify(checkpoint)
    step = read_position(checkpoint).step
    assert list(losses(read_metrics(metrics))) == list(range(1, step + 1))
    assert output.read_text().endswith(
        f"{number.name}: saved after step {step} of 1000000, in {checkpoint}\n"
        f"continue, started as before, with --resume '{run}'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--steps", "many"], "train.steps = 'many': must be a valid integer"),
        (["--nonsense"], "unrecognized arguments: --nonsense; see --help"),
        (["--stpes", "3"], "unrecognized arguments: --stpes 3; did you mean --steps? see --help"),
        (["smaple"], "unrecognized arguments: smaple; did you mean sample? see --help"),
        (["sample", "run"], "sample run; a command must be the first word; see --help"),
        (["--mesh", "2x"], "parallel.mesh = '2x': must be 0 (all ranks), a number of ranks, or"),
        (["--mesh", "2x2"], "there are 1; use --mesh 1, or start 4 ranks"),
        (["--config", "gone.toml"], "config file gone.toml: No such file"),
        (["--data", "gone.txt"], "data gone.txt: no such file"),
        (["--mesh", "3"], "parallel.mesh = 3: the mesh covers all ranks, and there are 1"),
        (["--device", "tpu"], "must be 'auto', 'cpu' or 'cuda'"),
        (["--resume", "gone"], "resume gone: no checkpoint there"),
        (["--resume", "auto"], "resume auto: give --out, the run folder"),
        (["--set", "run.metrics=paper"], "must be 'jsonl' or 'tensorboard'"),
        (["--resume", "latest"], "resume latest: no run with a checkpoint under runs/"),
        (["--set", "model.context=5000"], "too few for a window of 5000"),
    ],
)
def test_an_error_is_one_line_exit_code_2_and_nothing_written(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    data = [] if "--data" in arguments else ["--data", str(text)]
    assert main([*settings(), *data, *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fullshard_train: error: ")
    assert captured.err.count("\n") == 1
    assert told in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--standalone", "--", "--stpes", "3"], "--stpes 3; did you mean --steps? see --help\n"),
        (["--", "sample", "run", "--promt", "x"], "--promt x; did you mean --prompt? see --help\n"),
        (["--nproc-per-nodes=2"], "--nproc-per-nodes=2; did you mean --nproc-per-node? see"),
    ],
)
def test_a_mistyped_word_of_a_launch_is_one_line_and_starts_no_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    started: list[object] = []
    monkeypatch.setattr("fullshard_train.commands.launch.run", started.append)
    assert main(["launch", *words]) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("fullshard_train: error: ")
    assert (captured.out, captured.err.count("\n"), started) == ("", 1, [])
    assert told in captured.err


def test_help_lists_the_commands_and_each_has_help_of_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    (listed,) = (part for part in capfd.readouterr().out.split("\n\n") if "commands" in part)
    for command in COMMANDS:
        assert f"\n  {command} " in listed
        assert main([command, "--help"]) == 0
        assert capfd.readouterr().out.startswith(f"usage: fullshard_train {command} ")


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "version", {"fullshard-train": "1.2.3"}.get)
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == "fullshard-train 1.2.3\n"


@pytest.fixture(scope="module")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps in this process, a world of one."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_bytes(TEXT)
    out = folder / "run"
    assert main([*settings(), "--data", str(folder / "text.txt"), "--out", str(out)]) == 0
    return out


@pytest.fixture
def finished(run_once: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(run_once, tmp_path / "run", symlinks=True))


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_holds_a_run_is_refused_and_left_alone(
    finished: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = _files(finished)
    assert main([*settings(), "--data", str(text), "--out", str(finished)]) == 2
    assert "nothing is overwritten" in capfd.readouterr().err
    assert _files(finished) == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "model.width=32"], "model.width must stay as in the checkpoint"),
        (["--seed", "5"], "train.seed must stay"),
        (["--steps", "3"], "it has 4 steps, more than train.steps = 3"),
        (["--data", "{other}"], "it was trained on other data"),
    ],
)
def test_what_would_not_continue_the_run_is_refused(
    finished: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    other = finished.parent / "other.txt"
    other.write_bytes(TEXT + b"more")
    before = _files(finished)
    words = [word.format(other=other) for word in arguments]
    assert main(["--resume", str(finished), *words]) == 2
    captured = capfd.readouterr().err
    assert told in captured
    assert captured.count("\n") == 1
    assert _files(finished) == before


def test_an_older_checkpoint_resumes_into_a_new_folder_only(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    older = finished / "checkpoints" / "step-00000002"
    before = _files(finished)
    assert main(["--resume", str(older)]) == 2
    assert "the run has a newer checkpoint" in capfd.readouterr().err
    assert main(["--resume", str(older), "--out", str(tmp_path / "again")]) == 0
    assert _files(finished) == before
    # The curve of the new folder begins with the old one's first half.
    assert untimed(tmp_path / "again" / "metrics.jsonl") == untimed(finished / "metrics.jsonl")


def test_a_finished_run_can_be_made_longer_in_place(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--resume", "latest", "--out", str(finished), "--steps", "6"]) == 0
    printed = capfd.readouterr().out
    assert "resumed" in printed and "\nwarning    the learning rate of step 5 rises" in printed
    assert list(losses(read_metrics(finished / "metrics.jsonl"))) == [1, 2, 3, 4, 5, 6]
    assert read_table(finished / "config.toml")["train"]["steps"] == 6
    latest = CheckpointStore(finished / "checkpoints").latest()
    assert latest is not None and latest.name == "step-00000006"


def test_a_longer_run_whose_learning_rate_rises_again_says_so(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--resume", str(finished), "--check-config", "--steps"]
    assert main([*words, "40"]) == 0
    printed = capfd.readouterr().out
    warning = "the learning rate of step 5 rises from 0.0004 to 0.00394: the schedule is now of 40"
    assert warning in printed
    cure = ["--set", "optim.learning_rate=0.0004", "--set", "optim.final_fraction=1"]
    assert " ".join(cure) in printed
    for quiet in (["4"], ["40", *cure]):
        assert main([*words, *quiet]) == 0
        assert "learning rate of step" not in capfd.readouterr().out


def test_resume_auto_begins_and_then_continues(
    finished: Path, tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "auto"
    words = [*settings(), "--data", str(text), "--out", str(out), "--resume", "auto"]
    # A run that was stopped before its first checkpoint leaves this.
    out.mkdir()
    (out / "config.toml").write_text("half a conf")
    (out / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 7.0}\n{"kin')
    (out / "checkpoints" / ".writing-00000002").mkdir(parents=True)
    assert main([*words, "--steps", "2", "--set", "optim.final_fraction=1"]) == 0
    assert "resumed" not in capfd.readouterr().out
    assert list(losses(read_metrics(out / "metrics.jsonl"))) == [1, 2]
    assert main([*words, "--steps", "4"]) == 0
    assert "step-00000002, after 2 steps" in capfd.readouterr().out
    assert list(losses(read_metrics(out / "metrics.jsonl"))) == [1, 2, 3, 4]
    first = losses(read_metrics(finished / "metrics.jsonl"))[1]
    assert losses(read_metrics(out / "metrics.jsonl"))[1] == first


def test_resume_auto_leaves_a_folder_alone_that_holds_something_else(
    tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "photos"
    out.mkdir()
    (out / "cat.png").write_bytes(b"cat")
    before = _files(out)
    words = ["--data", str(text), "--out", str(out), "--resume", "auto"]
    assert main([*settings(), *words]) == 2
    assert "nothing is overwritten" in capfd.readouterr().err
    assert _files(out) == before


@pytest.mark.parametrize(
    ("wanted", "made"),
    [("{out}/w.st", ["w.st"]), pytest.param("none", [], marks=pytest.mark.matrix)],
)
def test_the_full_weights_go_where_they_were_asked_for(
    tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str], wanted: str, made: list[str]
) -> None:
    out = tmp_path / "run"
    words = ["--data", str(text), "--out", str(out), "--export", wanted.format(out=out)]
    assert main([*settings(), *words]) == 0
    found = [path.name for path in out.iterdir() if path.suffix in (".st", ".safetensors")]
    assert found == made
    assert all(str(out / name) in capfd.readouterr().out for name in made)


def test_a_damaged_checkpoint_is_one_line_and_changes_nothing(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = next((finished / "checkpoints" / "step-00000004").glob("__0_*.distcp"))
    damage(file)
    before = _files(finished)
    assert main(["--resume", str(finished)]) == 2
    captured = capfd.readouterr().err
    assert f"{file.name} is damaged" in captured
    assert captured.count("\n") == 1
    assert _files(finished) == before
