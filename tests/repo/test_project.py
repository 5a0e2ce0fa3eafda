"""What people who join meet: workflows, hooks, templates, the citation and the release's notes."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.members import MEMBERS, ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NOXFILE = ast.parse((ROOT / "noxfile.py").read_text())


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _sessions() -> set[str]:
    """The names of the functions that are sessions of nox."""
    found = set()
    for node in NOXFILE.body:
        if isinstance(node, ast.FunctionDef):
            marks = [ast.unparse(each) for each in node.decorator_list]
            if any(mark.startswith("nox.session") for mark in marks):
                found.add(node.name)
    return found


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_the_workflows_run_sessions_that_exist() -> None:
    run = [
        word for path in WORKFLOWS for word in re.findall(r'nox -s "?([\w-]+)', path.read_text())
    ]
    assert {"lint", "types", "tests", "versions", "docs", "release"} <= set(run) <= _sessions()


def test_the_matrix_of_versions_is_that_of_the_session() -> None:
    (versions,) = (
        ast.literal_eval(node.value)
        for node in NOXFILE.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERSIONS"
    )
    jobs = _yaml(ROOT / ".github/workflows/ci.yml")["jobs"]
    included = jobs["versions"]["strategy"]["matrix"]["include"]
    assert [(each["python"], each["torch"]) for each in included] == versions


def test_the_hooks_before_a_commit_have_the_pinned_versions() -> None:
    hooks = {
        Path(each["repo"]).name: each["rev"].removeprefix("v")
        for each in _yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    }
    pins = _pins()
    assert hooks["ruff-pre-commit"] == pins["ruff"]
    assert hooks["check-jsonschema"] == pins["check-jsonschema"]


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_a_template_of_an_issue_asks_for_what_is_needed(name: str) -> None:
    form = _yaml(ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml")
    assert {"name", "description", "body"} <= form.keys()
    ids = [each["id"] for each in form["body"]]
    assert len(ids) == len(set(ids))
    assert name != "bug" or {"what", "program", "doctor"} <= set(ids)


def test_the_citation_has_the_version_and_the_address_of_the_packages() -> None:
    told = _yaml(ROOT / "CITATION.cff")
    metadata = MEMBERS[0].metadata
    assert told["cff-version"] == "1.2.0"
    assert told["version"] == metadata["version"]
    assert told["license"] == metadata["license"]
    assert told["repository-code"] == metadata["urls"]["Repository"]


def test_each_console_script_names_a_function() -> None:
    scripts = {
        name: (member, target)
        for member in MEMBERS
        for name, target in member.metadata.get("scripts", {}).items()
    }
    assert {"fullshard", "fullshard-train", "fullshard-bench"} <= set(scripts)
    for member, target in scripts.values():
        module, function = target.split(":")
        (found,) = (each for each in member.modules() if each.name == module)
        names = {getattr(node, "name", None) for node in found.tree.body}
        names |= {name for _, name in found.imports()}
        assert function in names


def test_every_classifier_is_known_and_each_member_has_those_of_the_supported_pythons() -> None:
    supported = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}
    known = set(pytest.importorskip("trove_classifiers").classifiers)
    for member in MEMBERS:
        classifiers = set(member.metadata["classifiers"])
        assert supported <= classifiers <= known


def test_the_notes_of_a_release_are_a_section_of_the_changelog() -> None:
    (function,) = (
        node for node in NOXFILE.body if isinstance(node, ast.FunctionDef) and node.name == "_notes"
    )
    namespace: dict[str, Any] = {"re": re}
    exec(compile(ast.Module([function], []), "noxfile.py", "exec"), namespace)
    text = "# Changelog\n\n## Unreleased\n\nnew\n\n## [0.2.0] - 2026-01-01\n\nold\n"
    assert namespace["_notes"](text, "0.2.0") == "# fullshard 0.2.0\n\nold\n"
    assert namespace["_notes"](text, "0.3.0") == "# fullshard 0.3.0\n\nnew\n"
    version = str(MEMBERS[0].metadata["version"])
    notes = namespace["_notes"]((ROOT / "CHANGELOG.md").read_text(), version)
    assert len(notes.splitlines()) > 3


def test_code_blocks_have_copy_buttons_and_search_works_in_files() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "    - content.code.copy\n" in settings
    assert re.search(r"plugins:\n  - search\n  - offline", settings)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert "mkdocs-material" in groups["docs"]
