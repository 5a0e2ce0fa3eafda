"""``plan``, ``verify`` and ``races`` on the command line: what they print, how they end."""

from __future__ import annotations

import importlib
import io
import json
import re
import signal
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fullshard.preflight.spi import exit_code_of, json_text
from support.ranks import distributed

COMMAND = importlib.import_module("fullshard.preflight.__main__")
COMMAND_LINE = importlib.import_module("fullshard.preflight.commands.command_line")

PROGRAM = """
from support.verification.fault import batch, build, loss, shard
from support.verification.faults import FAULTS

def good():
    return {"build_model": build, "shard": shard, "batch": batch, "loss": loss}

def bad():
    return good() | FAULTS[0].program


"""


def _run(folder: Path, *words: str) -> tuple[int, str]:
    (folder / f"program{dist.get_rank()}.py").write_text(PROGRAM)
    sys.path.insert(0, str(folder))
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            function = f"program{dist.get_rank()}:{words[0]}"
            return COMMAND.main(["verify", function, *words[1:]]), printed.getvalue()
    finally:
        sys.path.remove(str(folder))


@distributed(2)
def test_it_prints_on_rank_0_and_ends_with_0_if_equal_and_1_if_not(tmp_path: Path) -> None:
    code, printed = _run(tmp_path, "good", "--steps", "1")
    assert code == 0
    assert printed.startswith("equal over 1 step\n" if dist.get_rank() == 0 else "")
    assert bool(printed) == (dist.get_rank() == 0)
    code, printed = _run(tmp_path, "bad")
    assert code == 1
    assert dist.get_rank() > 0 or "cause: random numbers drawn per rank" in printed


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("program:", r"'program:' is no module:function"),
        ("no_program", r"cannot be imported: No module named 'no_program'"),
        ("no_such_module:function", r"cannot be imported: No module named"),
        ("math:no_such", r"cannot be imported: module 'math' has no attribute"),
    ],
)
def test_a_wrong_function_is_said_in_one_line(
    word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMAND.main(["verify", word]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
    assert re.search(says, said)


SCRIPT = """
import torch
from torch import nn

from fullshard.sharding import fully_shard

def build_model():
    print("printed by the program")
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

def shard(model, mesh=None):
    for each in model:
        fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def batch(step):
    return torch.full((4, 8), step + 1.0)

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's script, whose functions are found by their names."""
    (tmp_path / "own_script.py").write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return str(tmp_path / "own_script.py")


def test_a_script_is_planned_on_several_meshes_against_a_budget(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", script, "--mesh", "2", "2x64", "--json"]
    assert COMMAND.main(words) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [each["mesh"] for each in plans] == [[2], [2, 64]]
    assert [each["fits"] for each in plans] == [None, None]
    assert all(sum(each["categories"].values()) == each["peak"] for each in plans)
    largest, smallest = sorted(plans, key=lambda each: -each["peak"])
    assert largest["peak"] > smallest["peak"]
    budget = str(smallest["peak"])
    assert COMMAND.main([*words, "--budget", budget]) == 0
    fits = [each["fits"] for each in json.loads(capsys.readouterr().out)]
    assert fits == [each is smallest for each in plans]
    mesh = "x".join(map(str, largest["mesh"]))
    assert COMMAND.main(["plan", script, "--mesh", mesh, "--budget", budget]) == 1
    assert capsys.readouterr().out.rstrip().endswith(f"does not fit {budget} bytes")


def test_the_plans_before_a_mesh_that_cannot_be_planned_are_not_lost(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(SCRIPT.replace(", mesh=None", "").replace(", mesh=mesh", ""))
    page = tmp_path / "plan.html"
    assert COMMAND.main(["plan", script, "--mesh", "2", "2x8", "--json", "--html", str(page)]) == 2
    printed = capsys.readouterr()
    assert [each["mesh"] for each in json.loads(printed.out)] == [[2]]
    assert "shard takes no mesh=" in printed.err
    assert "Plan of" in page.read_text()


def test_a_script_is_watched_for_races(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert COMMAND.main(["races", script, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert report["races"] == []
    assert report["collectives"] > 0
    Path(script).write_text(SCRIPT.replace("fully_shard(each, mesh=mesh)", "pass").replace(
        "return fully_shard(model, mesh=mesh)", "pass"
    ))  # fmt: skip
    assert COMMAND.main(["races", script]) == 1
    assert "the engine launched no collective" in capsys.readouterr().out


@distributed(2)
def test_a_script_is_verified_and_the_verdict_is_a_value(tmp_path: Path) -> None:
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    (folder / "own_script.py").write_text(SCRIPT)
    printed = io.StringIO()
    with redirect_stdout(printed), patch.object(sys, "path", [*sys.path]):
        code = COMMAND.main(["verify", str(folder / "own_script.py"), "--steps", "1", "--json"])
    assert code == 0
    assert "printed by the program" not in printed.getvalue()
    if dist.get_rank() == 0:
        verdict = json.loads(printed.getvalue())
        assert verdict["equal"] and verdict["steps"] == 1 and verdict["first"] is None


OF_STEP = (
    SCRIPT[: SCRIPT.index("def loss")]
    + """
def step(model, optimizers, batch):
    for optimizer in optimizers:
        yield model(batch).square().mean()
        optimizer.step()
        optimizer.zero_grad()

def optimizers(model):
    return [torch.optim.Adam(each.parameters()) for each in model]
"""
)


@distributed(2)
def test_a_script_with_a_function_for_the_step_is_verified(tmp_path: Path) -> None:
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    (folder / "own_script.py").write_text(OF_STEP)
    with patch.object(sys, "path", [*sys.path]):
        assert COMMAND.main(["verify", str(folder / "own_script.py"), "--steps", "1"]) == 0


@pytest.mark.parametrize("command", ["plan", "races"])
def test_a_script_with_a_function_for_the_step_is_run(command: str, script: str) -> None:
    Path(script).write_text(OF_STEP)
    assert COMMAND.main([command, script, "--mesh", "2"]) == 0


def test_a_script_with_a_loss_may_have_other_functions_of_these_names(script: str) -> None:
    Path(script).write_text(SCRIPT + "def step(): ...\ndef optimizers(): ...\n")
    assert COMMAND.main(["plan", script, "--mesh", "2"]) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no function build_model, batch, loss; it needs build_model(), batch(step)"),
        ("def preflight(): return 3", "returned a int; return a dict of the arguments of verify"),
        ("def preflight(): return {'modell': 3}", "has modell, which is no argument; use "),
        (
            "import no_such_thing as build_model, os as batch, re as loss",
            "cannot be imported: No module named 'no_such_thing'",
        ),
        ("def build_model(:", "cannot be imported: invalid syntax (own_script.py, line 1)"),
        ("build_model = batch = loss = print\n{}['lr']", "cannot be imported: KeyError: 'lr' ("),
        (
            "build_model = batch = loss = 3; raise SystemExit(3)",
            "line 1); the commands import it, so what trains belongs below",
        ),
    ],
)
def test_a_script_without_its_functions_is_refused(
    text: str, says: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(text)
    assert COMMAND.main(["plan", script]) == 2
    assert says in capsys.readouterr().err
    assert COMMAND.main(["plan", f"{script}.py"]) == 2
    assert "does not exist; pass a script or a module" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("raise SystemExit(3)", False),
        ("class Net: build_model = batch = loss = print\nraise SystemExit(3)", False),
        ("from os.path import *\nraise SystemExit(3)", True),
        ("def batch(step): ...\nfrom os import path as loss\nbuild_model = 3\n{}[2]", True),
    ],
)
def test_a_script_that_cannot_have_the_functions_is_refused_before_it_runs(
    text: str, runs: bool, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(text)
    assert COMMAND.main(["plan", script]) == 2
    said = capsys.readouterr().err
    assert ("cannot be imported" if runs else "has no function build_model, batch, loss;") in said
    assert runs or "`fullshard init example.py` writes" in said


@pytest.mark.parametrize("command", ["plan", "races"])
def test_an_error_of_the_program_is_no_finding(
    command: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(script).write_text(SCRIPT.replace("return model(batch)", "return batch.no_such_name"))
    assert COMMAND.main([command, script]) == 2
    said = capsys.readouterr().err
    assert "Tensor' object has no attribute 'no_such_name'" in said
    assert said.endswith(f"error: {command} could not run {script} to its end; see above\n")


@distributed(2)
def test_an_error_of_a_verified_program_ends_each_rank_with_2(tmp_path: Path) -> None:
    folder = tmp_path / str(dist.get_rank())
    folder.mkdir()
    text = SCRIPT.replace("return model(batch)", "return batch.no_such_name")
    (folder / "own_script.py").write_text(text)
    with patch.object(sys, "path", [*sys.path]):
        assert COMMAND.main(["verify", str(folder / "own_script.py")]) == 2


@pytest.mark.parametrize("option", ["--html", "--picture"])
def test_a_file_that_cannot_be_written_is_refused_before_the_program_runs(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMAND.main(["plan", "no_program.py", option, f"{tmp_path}/none/file.png"]) == 2
    assert "cannot be written: there is no folder" in capsys.readouterr().err


def test_a_picture_of_no_known_format_is_refused(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMAND.main(["plan", script, "--picture", f"{script}.none"]) == 2
    assert "own_script.py.none: Format 'none' is not supported" in capsys.readouterr().err


def test_a_rank_or_launcher_that_a_signal_ended_has_the_exit_code_of_a_shell() -> None:
    def failed(code: int) -> None:
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file="")
        raise ChildFailedError("train.py", {0: failure})

    def interrupted() -> None:
        raise SignalException("got signal: 2", signal.SIGINT)

    assert exit_code_of(lambda: None) == 0
    assert exit_code_of(lambda: failed(7)) == 7
    assert exit_code_of(lambda: failed(-9)) == 128 + 9
    assert exit_code_of(interrupted) == 128 + 2


def test_json_has_null_for_numbers_that_json_lacks() -> None:
    value = {"loss": [float("nan"), 1.5], "limits": {"high": float("inf")}}
    text = json_text(value)
    assert json.loads(text) == {"loss": [None, 1.5], "limits": {"high": None}}
    assert "NaN" not in text


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_ctrl_c_ends_a_command_with_one_line_and_130(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    for name in ("start_ranks", "load_program"):
        monkeypatch.setattr(COMMAND_LINE, name, interrupted)
    # a shell ignores it in what it runs in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert COMMAND_LINE.main([command, *(["x.py"] if command == "plan" else [])]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == f"python -m fullshard.preflight {command}: stopped\n"
