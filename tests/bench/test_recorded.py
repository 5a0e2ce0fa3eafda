"""The results that are kept in `benchmarks/`: readable, complete, right, and of no one machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fullshard_bench.records.result import read_result
from fullshard_bench.reporting.report import markdown_of
from support.members import ROOT

RECORDED = sorted((ROOT / "benchmarks").glob("*.json"))

each_recorded = pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)


def test_there_is_a_recorded_result() -> None:
    assert RECORDED


@each_recorded
def test_its_name_says_workload_hardware_and_date(path: Path) -> None:
    assert re.fullmatch(r"[\w-]+_[\w-]+_\d{4}-\d\d-\d\d", path.stem)


@each_recorded
def test_every_contestant_agreed_with_the_unsharded_model(path: Path) -> None:
    entries = [
        entry for run in read_result(path).runs for point in run.points for entry in point.entries
    ]
    assert {entry.status for entry in entries} <= {"ok", "unchecked"}


@each_recorded
def test_its_report_shows_the_same_result_and_its_pictures_are_there(path: Path) -> None:
    report = path.with_suffix(".md").read_text()
    for name in re.findall(r"!\[\w*[^]]*\]\(([^)]+)\)", report):
        assert (path.parent / name).is_file()
    # The tables: what is written above them depends on which pictures were asked for.
    tables = markdown_of(read_result(path), ()).partition("\n## ")[2]
    assert tables in report


@each_recorded
def test_it_names_no_folder_outside_the_repository(path: Path) -> None:
    for each in (path, path.with_suffix(".md")):
        assert not re.search(r"(^|[\s\"'=])/\w", each.read_text())
