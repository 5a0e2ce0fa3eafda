"""The table of what the project ran on says what the nox session and the records say."""

from __future__ import annotations

import ast
import json

from support.members import ROOT

HEADING = "## What it ran on"


def _table(page: str) -> list[list[str]]:
    """The cells of each row under the heading, without the two rows above them."""
    text = (ROOT / page).read_text().partition(f"\n{HEADING}\n")[2].strip().partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return rows[2:]


def _stated(word: str) -> set[tuple[str, str]]:
    """The versions of Python and torch in the rows that begin with ``word``."""
    rows = (row for row in _table("README.md") if row[3].startswith(word))
    return {(python, torch.partition(",")[0]) for torch, python, *_ in rows}


def test_readme_and_home_show_the_same_table() -> None:
    assert _table("README.md")
    assert _table("README.md") == _table("docs/index.md")


def test_what_was_tested_is_what_the_session_runs() -> None:
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    (versions,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "VERSIONS"
    )
    assert _stated("tested") == set(versions)


def test_what_was_measured_is_what_the_records_say() -> None:
    records = [json.loads(path.read_text()) for path in (ROOT / "benchmarks").glob("*.json")]
    builds = set()
    for versions in (record["versions"] for record in records):
        build = "CPU build" if versions["cuda"] == "none" else f"CUDA {versions['cuda']}"
        torch = f"{versions['torch'].partition('+')[0]}, {build}"
        builds.add((torch, versions["python"].rpartition(".")[0]))
    rows = (row for row in _table("README.md") if row[3].startswith("measured"))
    assert builds == {(torch, python) for torch, python, *_ in rows}
