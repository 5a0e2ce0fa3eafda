"""``tools/bump.py``: all versions and pins of the workspace change together, or none does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.members import MEMBERS, ROOT


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A copy of the workspace: what the tool reads, at version 1.2.3."""
    files = [ROOT / "pyproject.toml", ROOT / "tools" / "bump.py"]
    files += [member.folder / "pyproject.toml" for member in MEMBERS]
    files += [member.source / "__init__.py" for member in MEMBERS if member.has_code]
    version = MEMBERS[0].metadata["version"]
    for path in files:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        if path.suffix != ".py" or path.name == "__init__.py":
            copy.write_text(copy.read_text().replace(f'"{version}"', '"1.2.3"'))
            copy.write_text(copy.read_text().replace(f"=={version}", "==1.2.3"))
    return tmp_path


def _bump(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/bump.py", *arguments]
    return subprocess.run(command, cwd=workspace, capture_output=True, text=True)


def _texts(workspace: Path) -> dict[Path, str]:
    names = ("pyproject.toml", "__init__.py")
    return {path: path.read_text() for name in names for path in sorted(workspace.rglob(name))}


def _projects(workspace: Path) -> dict[str, dict[str, object]]:
    paths = [path for path in workspace.rglob("*.toml") if path.parent != workspace]
    projects = [tomllib.loads(path.read_text())["project"] for path in paths]
    return {project["name"]: project for project in projects}


def test_every_member_gets_the_version_and_pins_its_siblings_to_it(workspace: Path) -> None:
    before = _projects(workspace)
    assert _bump(workspace, "1.3.0").returncode == 0
    after = _projects(workspace)
    assert after.keys() == {member.name for member in MEMBERS}
    for name, project in after.items():
        assert project["version"] == "1.3.0"
        was = before[name]["dependencies"]
        assert isinstance(was, list)
        siblings = "|".join(after)
        pinned = [re.sub(rf"^({siblings})==1\.2\.3$", r"\1==1.3.0", line) for line in was]
        assert project["dependencies"] == pinned


def test_every_package_says_the_new_version(workspace: Path) -> None:
    assert _bump(workspace, "1.3.0").returncode == 0
    packages = [path.read_text() for path in workspace.rglob("__init__.py")]
    assert len(packages) == len([member for member in MEMBERS if member.has_code])
    assert all('\n__version__ = "1.3.0"\n' in text for text in packages)


def test_nothing_but_versions_and_pins_changes(workspace: Path) -> None:
    before = _texts(workspace)
    _bump(workspace, "10.0.0")
    for path, text in _texts(workspace).items():
        assert text.replace("10.0.0", "1.2.3") == before[path]


@pytest.mark.parametrize(
    "version",
    ["1.3", "1.3.0.0", "v1.3.0", "1.3.0rc1", "1.3.x", "01.3.0", "1.3.0 ", "", "-1.3.0", "2.0.٣"],
)
def test_a_malformed_version_is_refused_and_nothing_is_written(
    workspace: Path, version: str
) -> None:
    before = _texts(workspace)
    result = _bump(workspace, version)
    assert result.returncode == 2
    assert "is not a version" in result.stderr
    assert _texts(workspace) == before


@pytest.mark.parametrize("version", ["1.2.3", "1.2.2", "1.1.9", "0.99.99"])
def test_a_version_that_is_not_newer_is_refused_and_nothing_is_written(
    workspace: Path, version: str
) -> None:
    before = _texts(workspace)
    result = _bump(workspace, version)
    assert result.returncode == 2
    assert "is not newer than 1.2.3" in result.stderr
    assert _texts(workspace) == before


def test_numbers_are_compared_as_numbers(workspace: Path) -> None:
    assert _bump(workspace, "1.2.10").returncode == 0
    assert _bump(workspace, "1.2.9").returncode == 2


def test_a_pin_that_the_tool_cannot_rewrite_stops_it_before_it_writes(workspace: Path) -> None:
    path = workspace / "packages" / "sharding" / "pyproject.toml"
    path.write_text(path.read_text().replace("fullshard-comm==1.2.3", "fullshard-comm>=1.2.3"))
    before = _texts(workspace)
    result = _bump(workspace, "1.3.0")
    assert result.returncode == 2
    assert "fullshard-comm>=1.2.3" in result.stderr
    assert _texts(workspace) == before


def test_members_that_disagree_are_not_bumped(workspace: Path) -> None:
    path = workspace / "packages" / "comm" / "pyproject.toml"
    path.write_text(path.read_text().replace('"1.2.3"', '"1.2.4"'))
    result = _bump(workspace, "1.3.0")
    assert result.returncode == 2
    assert "several versions" in result.stderr


@pytest.mark.parametrize("arguments", [(), ("1.3.0", "1.4.0")])
def test_exactly_one_version_is_asked_for(workspace: Path, arguments: tuple[str, ...]) -> None:
    result = _bump(workspace, *arguments)
    assert result.returncode == 2
    assert "give one version" in result.stderr
