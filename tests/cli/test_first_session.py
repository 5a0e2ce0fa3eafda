"""The first page of the documentation, command by command, as a new user types them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from fullshard.cli import main
from support.members import MEMBERS, ROOT

PAGE = ROOT / "docs" / "first-session.md"
FENCES = [each for each in MarkdownIt().parse(PAGE.read_text()) if each.type == "fence"]
COMMANDS = [
    line for each in FENCES if each.info == "sh" for line in each.content.splitlines() if line
]
OURS = [line for line in COMMANDS if line.startswith("fullshard ")]
OUTPUTS = [each.content for each in FENCES if each.info.startswith("text ")]


def test_the_page_has_four_commands_each_with_an_output() -> None:
    assert [shlex.split(line)[1] for line in OURS] == ["plan", "verify", "run", "compare"]
    assert len(OUTPUTS) == len(OURS)


def test_what_it_installs_is_what_the_page_about_installing_has() -> None:
    install = (ROOT / "docs" / "install.md").read_text()
    others = [line for line in COMMANDS if line not in OURS]
    assert others
    assert all(f"`{line}`" in install for line in others)


def _shown(text: str, printed: str) -> bool:
    """Whether the page's lines are the first lines of what was printed, but for numbers."""
    pattern = re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", re.escape(text.rstrip()))
    return re.match(pattern, printed.lstrip()) is not None


def _in_a_process(words: list[str]) -> tuple[int, str, str]:
    sources = [str(member.folder / "src") for member in MEMBERS if member.has_code]
    environment = {
        **os.environ,
        # the sources and the installed packages, without the folder of tests
        "PYTHONPATH": os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "fullshard.cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


def _here(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code, *capfd.readouterr()


def test_the_session_plans_verifies_runs_and_inspects_the_script_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (script,) = (each for each in FENCES if each.info.startswith("python"))
    (tmp_path / "train.py").write_text(script.content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script's folder goes there,
    monkeypatch.delitem(sys.modules, "train", raising=False)  # and its module here
    for line, shown in zip(OURS, OUTPUTS, strict=True):
        words = shlex.split(line)[1:]
        # the run has ranks of its own; the others need none, and are quicker here
        code, out, err = _in_a_process(words) if words[0] == "run" else _here(words, capfd)
        assert code == 0, f"{line}\n{out}{err}"
        # what ranks say about the installation goes to the other stream
        assert _shown(shown, out) or _shown(shown, err), out + err
    ranks = [json.loads(each.read_text()) for each in (tmp_path / "runs/first").glob("rank-*.json")]
    assert [each["steps"] for each in ranks] == [60, 60]
    assert all(each["events"]["all_gather"]["count"] > 0 for each in ranks)  # ours, not torch's
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0]
