"""Each line that installs names every layer that it needs, can be run, and brings what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.members import MEMBERS, ROOT

PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.*")]
PAGES += [member.folder / "README.md" for member in MEMBERS]
LINES = sorted(
    {
        (str(page.relative_to(ROOT)), line.strip())
        for page in PAGES
        for line in re.findall(r"pip install (\./(?:packages|apps)/[^`#\n\"]*)", page.read_text())
    }
)


def _members(line: str) -> set[Path]:
    """The folders that a line names."""
    words = [word for word in line.split() if word.startswith("./")]
    return {folder for word in words for folder in ROOT.glob(word) if folder.is_dir()}


def test_there_are_lines() -> None:
    assert len(LINES) > 5


@pytest.mark.parametrize(("page", "line"), LINES, ids=lambda value: value)
def test_a_line_needs_no_layer_from_a_package_index(page: str, line: str) -> None:
    named = {member.name: member for member in MEMBERS if member.folder in _members(line)}
    assert named, f"{page}: {line} names no member"
    wanted = {
        requirement.partition("==")[0]
        for member in named.values()
        for requirement in member.metadata["dependencies"]
        if requirement.startswith("fullshard")
    }
    assert wanted <= named.keys(), f"{page}: {line} lacks {sorted(wanted - named.keys())}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_from_an_index_what_is_on_none(page: Path) -> None:
    commands = re.findall(r"pip install ([^`\n]*)", page.read_text(errors="replace"))
    from_index = [each for each in commands if re.search(r"(?<![\w/.])fullshard\b", each)]
    assert [each for each in from_index if "--find-links" not in each] == []


def test_the_page_has_a_line_for_each_layer() -> None:
    text = (ROOT / "docs" / "install.md").read_text()
    last = {line.split()[-1] for line in re.findall(r"pip install ([^`\n]*)`", text)}
    wanted = {f"./packages/{each.folder.name}" for each in MEMBERS if each.is_library}
    assert (
        wanted - {"./packages/wire", "./packages/samehost"} <= last
    )  # which go with any other line


def test_the_rooms_that_the_readme_of_comm_names_are_there() -> None:
    (comm,) = (member for member in MEMBERS if member.name == "fullshard-comm")
    parts = (comm.folder / "README.md").read_text().split("## The parts")[1].split("\n## ")[0]
    rooms = {path.parent.name for path in comm.source.glob("*/__init__.py")}
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", parts)) == rooms


def _check_command() -> list[str]:
    """The command on the page that says whether an installation is there."""
    text = (ROOT / "docs" / "install.md").read_text()
    (command,) = re.findall(r"(?m)^python (-c .*)$", text)
    return shlex.split(command)


SHORT = "./packages/comm ./packages/sharding"
REAL = {line for page, line in LINES if page == "docs/install.md"} | {SHORT}


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=() if line == SHORT else pytest.mark.matrix)
        for line in sorted(REAL)
    ],
)
def test_a_line_installs_its_layers_and_the_check_finds_them(line: str, tmp_path: Path) -> None:
    """Without what comes from an index: torch is here, and nothing is downloaded."""
    folders = sorted(str(folder) for folder in _members(line))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    install = [sys.executable, "-m", "pip", "install", *options, "--target", str(tmp_path)]
    subprocess.run([*install, *folders], check=True, cwd=ROOT)
    named = [member for member in MEMBERS if member.folder in _members(line) and member.has_code]
    imports = "; ".join(f"import {each.package} as m; print(m.__file__)" for each in named)
    for words in (_check_command(), ["-c", imports]):
        done = subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        found = done.stdout.splitlines()
        assert found
        assert all(str(tmp_path) in each for each in found)
