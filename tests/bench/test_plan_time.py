"""Planned against measured time: the command, its record, and what the documentation says of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard_bench.cli import main
from fullshard_bench.errors import BenchError
from fullshard_bench.machine import OtherWork
from fullshard_bench.planning import times
from fullshard_bench.planning.record import (
    HEADS,
    MEMORY_HEADS,
    Case,
    CaseResult,
    Round,
    Steps,
    markdown_of_record,
    memory_rows,
    read_plan_record,
    rows_of_record,
    write_plan_record,
)
from fullshard_bench.report import markdown_table
from support.members import ROOT

RECORDS = sorted((ROOT / "benchmarks" / "plans").glob("*.json"))
PAGE = ROOT / "docs" / "concepts" / "plan-time.md"

CASE = Case(model="gpt-tiny", ranks=1, tokens=8, has_goal=True)
ROUND = Round(
    planned_ms=9.0,
    exposed_ms=1.0,
    basis="measured",
    planned_peak=2**20,
    apart=Steps(ms=(10.0, 10.0, 12.0), peak=2**20),
    shared=Steps(ms=(8.0, 8.0), peak=2**19),
)


def test_a_case_is_planned_and_measured_in_processes_of_its_own() -> None:
    found = times._planned_and_measured(CASE)
    assert found.planned_ms > 0
    assert len(found.apart.ms) == 30
    assert found.planned_peak == pytest.approx(found.apart.peak, rel=0.03)
    assert "1 ranks at once with 1 threads each" in found.basis


def test_a_round_beside_other_processes_is_not_recorded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(times, "CASES", (CASE,))
    monkeypatch.setattr(times, "_planned_and_measured", lambda case: ROUND)
    words = ["plan-time", "--rounds", "1", "--out", str(tmp_path / "time")]
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.06)
    assert main(words) == 2
    assert "other processes had 6% of this machine's cores meanwhile" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.04)
    assert main(words) == 0
    assert read_plan_record(tmp_path / "time.json").cases[0].rounds == (ROUND,)


def test_the_ratio_is_of_the_medians_over_all_rounds() -> None:
    slower = replace(ROUND, planned_ms=11.0, apart=Steps(ms=(14.0,) * 3, peak=2**20))
    found = CaseResult(case=CASE, rounds=(ROUND, slower))
    assert found.planned_ms == 10.0
    assert found.measured_ms == 13.0
    assert found.ratio == pytest.approx(10 / 13)
    assert not found.is_met
    assert CaseResult(case=CASE, rounds=(ROUND,)).is_met


def test_a_second_run_adds_its_rounds_to_the_record(tmp_path: Path) -> None:
    other = replace(CASE, ranks=2)
    write_plan_record([CaseResult(case=CASE, rounds=(ROUND,))], "first", tmp_path / "time")
    again = [CaseResult(case=each, rounds=(ROUND,)) for each in (other, CASE)]
    record = write_plan_record(again, "second", tmp_path / "time")
    assert [(each.case, len(each.rounds)) for each in record.cases] == [(CASE, 2), (other, 1)]
    assert read_plan_record(tmp_path / "time.json") == record
    elsewhere = (tmp_path / "time.json").read_text().replace('"cores"', '"cpus"')
    (tmp_path / "time.json").write_text(elsewhere)
    with pytest.raises(BenchError, match="of another machine or other versions"):
        write_plan_record(again, "third", tmp_path / "time")


def test_a_case_that_is_none_is_an_error_that_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-time", "--case", "gpt-huge"]) == 2
    assert "--case gpt-huge: must be among gpt-mini, 1 rank; gpt-mini, 2 ranks" in (
        capsys.readouterr().err
    )
    assert main(["plan-time", "--rounds", "0"]) == 2


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_and_its_report_say_the_same_and_name_no_folder(path: Path) -> None:
    assert re.fullmatch(r"[\w-]+_[\w-]+_\d{4}-\d\d-\d\d", path.stem)
    assert path.with_suffix(".md").read_text() == markdown_of_record(read_plan_record(path))
    assert not re.search(r"(^|[\s\"'=])/\w", path.read_text())


def test_the_page_shows_the_tables_of_the_newest_record() -> None:
    record = read_plan_record(RECORDS[-1])
    page = PAGE.read_text()
    assert RECORDS[-1].stem in page
    for heads, rows in (
        (HEADS, rows_of_record(record.cases)),
        (MEMORY_HEADS, memory_rows(record.cases)),
    ):
        assert "\n".join(markdown_table(heads, rows)) in page
