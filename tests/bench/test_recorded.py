"""The results that are kept in `benchmarks/`: readable, complete, right, and of no one machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fullshard_bench.records.compact import compact_json
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
def test_its_report_shows_the_same_result_and_no_picture(path: Path) -> None:
    report = path.with_suffix(".md").read_text()
    assert "![" not in report, "pictures are not kept: `draw` makes them from the record"
    # The tables: what is written above them depends on which pictures were asked for.
    tables = markdown_of(read_result(path), ()).partition("\n## ")[2]
    assert tables in report


@each_recorded
def test_it_names_no_folder_outside_the_repository(path: Path) -> None:
    for each in (path, path.with_suffix(".md")):
        assert not re.search(r"(^|[\s\"'=])/\w", each.read_text())


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": None, "b": [], "c": {}, "d": True},
        ['a, "b"\n', -1.5e-30, 0.1, 2**70, float("inf")],
        {"steps": [n / 7 for n in range(200)], "runs": [{"points": [{"mesh": "2", "x": [1]}] * 9}]},
        [[[n] * 40] * 3 for n in range(3)],
    ],
)
def test_compact_json_reads_back_equal_with_a_line_for_each_small_value(value: Any) -> None:
    text = compact_json(value)
    assert json.loads(text) == value
    numbers_alone = [line for line in text.splitlines() if re.fullmatch(r"[\d.]+,?", line.strip())]
    assert numbers_alone == []


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks").rglob("*.json")), ids=lambda path: path.stem
)
def test_each_kept_file_is_compact(path: Path) -> None:
    text = path.read_text()
    assert text == compact_json(json.loads(text)) + "\n"
