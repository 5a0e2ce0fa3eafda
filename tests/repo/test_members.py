"""What every member of the workspace keeps to: one version, one namespace, declared imports."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from support.members import MEMBERS, ROOT, Member

CODE = [member for member in MEMBERS if member.has_code]

each_member = pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
each_with_code = pytest.mark.parametrize("member", CODE, ids=lambda member: member.name)

NAMES = {member.name for member in MEMBERS}


def _requirements(member: Member) -> dict[str, str]:
    """The version specifier of each dependency, by name."""
    split = (re.fullmatch(r"([\w-]+)(.*)", line) for line in member.metadata["dependencies"])
    return {match[1]: match[2] for match in split if match}


def test_every_folder_with_a_pyproject_is_a_member_of_the_workspace() -> None:
    folders = {
        path.parent for kind in ("packages", "apps") for path in ROOT.glob(f"{kind}/*/*.toml")
    }
    assert folders == {member.folder for member in MEMBERS}


def test_no_member_owns_the_namespace() -> None:
    assert [str(path) for path in ROOT.rglob("src/fullshard/__init__.py")] == []


def test_all_members_carry_one_version() -> None:
    assert len({member.metadata["version"] for member in MEMBERS}) == 1


@each_member
def test_siblings_are_pinned_to_the_same_version(member: Member) -> None:
    pins = {name: pin for name, pin in _requirements(member).items() if name in NAMES}
    assert pins == dict.fromkeys(pins, f"=={member.metadata['version']}")


@each_with_code
def test_a_package_says_its_version(member: Member) -> None:
    package = importlib.import_module(member.package)
    assert package.__version__ == member.metadata["version"]


@each_with_code
def test_a_member_ships_py_typed(member: Member) -> None:
    assert (member.source / "py.typed").is_file()


@each_member
def test_a_member_says_what_it_needs_and_whose_it_is(member: Member) -> None:
    assert member.metadata["license"] == "Apache-2.0"
    assert member.metadata["requires-python"] == ">=3.11"
    assert _requirements(member)["torch"] == ">=2.11"
    assert (member.folder / member.metadata["readme"]).is_file()


def test_all_members_give_the_same_addresses() -> None:
    addresses, *others = (member.metadata["urls"] for member in MEMBERS)
    assert set(addresses) == {"Changelog", "Documentation", "Repository"}
    assert others == [addresses] * len(others)


@each_member
def test_a_members_readme_has_no_link_that_a_registry_cannot_follow(member: Member) -> None:
    text = re.sub(r"```.*?```", "", (member.folder / "README.md").read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_fullshard_holds_no_code_and_brings_every_library() -> None:
    (whole,) = (member for member in MEMBERS if not member.has_code)
    assert whole.name == "fullshard"
    libraries = {member.name for member in MEMBERS if member.is_library}
    assert set(_requirements(whole)) == libraries | {"torch"}


@each_with_code
def test_a_member_declares_each_sibling_it_imports(member: Member) -> None:
    packages = {other.package: other.name for other in CODE if other is not member}
    imported = {
        name
        for module in member.modules()
        for source, _ in module.imports()
        for package, name in packages.items()
        if f"{source}.".startswith(f"{package}.")
    }
    assert imported <= set(_requirements(member))


def test_every_tool_and_dependency_has_one_pinned_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wanted = {re.split(r"[>\[]", name)[0] for group in groups.values() for name in group}
    for member in MEMBERS:
        wanted |= set(_requirements(member)) - NAMES
    assert wanted <= set(pins)


def test_the_pytest_and_mypy_paths_name_every_member() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    sources = {str((member.folder / "src").relative_to(ROOT)) for member in CODE}
    assert set(tool["pytest"]["ini_options"]["pythonpath"]) == sources | {"tests"}
    assert set(tool["mypy"]["mypy_path"]) == sources | {"tests"}


def test_the_license_is_the_apache_license() -> None:
    assert "Version 2.0, January 2004" in Path(ROOT, "LICENSE").read_text()


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_a_member_carries_the_license_into_its_wheel(member: Member) -> None:
    assert (member.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
