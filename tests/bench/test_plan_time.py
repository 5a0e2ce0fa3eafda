"""Planned against measured time: the command, its record, and what the documentation says of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard_bench.cli import main
from fullshard_bench.launching.machine import OtherWork
from fullshard_bench.planning import times
from fullshard_bench.planning.record import (
    HEADS,
    MEMORY_HEADS,
    Case,
    CaseResult,
    Recording,
    Round,
    Steps,
    markdown_of_record,
    memory_rows,
    read_plan_record,
    rows_of_record,
)
from fullshard_bench.reporting.report import markdown_table
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


@pytest.mark.matrix
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
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.11)
    assert main(words) == 2
    assert "other processes had 11.0% of this machine's cores meanwhile" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.09)
    assert main(words) == 0
    assert read_plan_record(tmp_path / "time.json").cases[0].rounds == (
        replace(ROUND, others=0.09),
    )


def test_the_ratio_is_of_the_medians_over_all_rounds() -> None:
    slower = replace(ROUND, planned_ms=11.0, apart=Steps(ms=(14.0,) * 3, peak=2**20))
    found = CaseResult(case=CASE, rounds=(ROUND, slower))
    assert found.planned_ms == 10.0
    assert found.measured_ms == 13.0
    assert found.ratio == pytest.approx(10 / 13)
    assert not found.is_met
    assert CaseResult(case=CASE, rounds=(ROUND,)).is_met


def test_each_round_is_kept_at_once_and_the_next_command_measures_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = replace(CASE, ranks=2)
    measured: list[Case] = []

    def planned_and_measured(case: Case) -> Round:
        measured.append(case)
        if len(measured) == 4:
            raise KeyboardInterrupt
        return ROUND

    monkeypatch.setattr(times, "CASES", (CASE, other))
    monkeypatch.setattr(times, "_planned_and_measured", planned_and_measured)
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.0)
    words = ["plan-time", "--out", str(tmp_path / "time"), "--rounds"]
    assert main([*words, "2"]) == 130, "in the last of four rounds"
    cases = read_plan_record(tmp_path / "time.json").cases
    assert [(each.case, len(each.rounds)) for each in cases] == [(CASE, 2), (other, 1)]
    assert main([*words, "2"]) == 0
    assert measured == [CASE, CASE, other, other, other]
    assert "1 round(s) of an earlier command" in capsys.readouterr().out
    assert main([*words, "3", "--case", CASE.name]) == 0
    record = read_plan_record(tmp_path / "time.json")
    assert [(each.case, len(each.rounds)) for each in record.cases] == [(CASE, 3), (other, 2)]
    first, second = record.command.splitlines()
    assert first.endswith("--rounds 2")
    assert second.endswith("--rounds 3 --case 'gpt-tiny, 1 rank'")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["time.json", "time.md"]


def test_what_is_no_record_of_this_machine_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stem, path = tmp_path / "time", tmp_path / "time.json"
    Recording("first", stem).add(CASE, ROUND)
    monkeypatch.setattr(times, "_planned_and_measured", lambda case: pytest.fail("measured"))
    path.write_text(path.read_text().replace('"cores"', '"cpus"'))
    assert main(["plan-time", "--out", str(stem)]) == 2
    assert "of another machine or other versions; name another file" in capsys.readouterr().err
    path.write_text("# Planned")
    assert main(["plan-time", "--out", str(stem)]) == 2
    assert "time.json is no record" in capsys.readouterr().err


def test_a_case_that_is_none_is_an_error_that_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-time", "--case", "gpt-huge"]) == 2
    assert "--case gpt-huge: must be among gpt-mini, 1 rank; gpt-mini, 2 ranks" in (
        capsys.readouterr().err
    )
    assert main(["plan-time", "--case", "gpt-mini, 1 rank", "gpt-huge"]) == 2
    assert "--case gpt-huge: must be among" in capsys.readouterr().err
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
