"""The first page of the documentation, command by command, as a new user types them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from markdown_it import MarkdownIt

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


def test_the_session_plans_verifies_runs_and_inspects_the_script_of_the_page(
    tmp_path: Path,
) -> None:
    (script,) = (each for each in FENCES if each.info.startswith("python"))
    (tmp_path / "train.py").write_text(script.content)
    sources = [str(member.folder / "src") for member in MEMBERS if member.has_code]
    environment = {
        **os.environ,
        # the sources and the installed packages, without the folder of tests
        "PYTHONPATH": os.pathsep.join([*sources, os.environ.get("PYTHONPATH", "")]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    for line, shown in zip(OURS, OUTPUTS, strict=True):
        command = [sys.executable, "-m", "fullshard.cli", *shlex.split(line)[1:]]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        # what ranks say about the installation goes to the other stream
        assert _shown(shown, done.stdout) or _shown(shown, done.stderr), done.stdout + done.stderr
    ranks = [json.loads(each.read_text()) for each in (tmp_path / "runs/first").glob("rank-*.json")]
    assert [each["steps"] for each in ranks] == [60, 60]
    assert all(each["events"]["all_gather"]["count"] > 0 for each in ranks)  # ours, not torch's
    losses = [
        json.loads(line)["loss"]
        for line in (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0]
