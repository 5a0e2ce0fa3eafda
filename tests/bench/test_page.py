"""A record as an HTML page: every contestant that may be compared has its bar and its row."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fullshard_bench.cli import main
from fullshard_bench.records.result import read_result
from support.members import ROOT

RECORDS = sorted((ROOT / "benchmarks").glob("cpu-set_*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_drawn_as_a_page(record: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["draw", str(record), "--html", str(page)]) == 0
    text = page.read_text()
    figures = [json.loads(each) for each in re.findall(r"data-figure=[^>]*>(.*?)</script>", text)]
    result = read_result(record)
    assert len(figures) == len(result.runs)
    for run, figure in zip(result.runs, figures, strict=True):
        drawn = {
            (bar["name"], mesh): step
            for bar in figure["data"]
            for mesh, step in zip(bar["x"], bar["y"], strict=True)
        }
        assert drawn == {
            (entry.name, f"{point.kind} {point.mesh}"): entry.derived.step_ms.value
            for point in run.points
            for entry in point.entries
            if entry.is_ranked and entry.derived is not None
        }
    assert text.count("<tr><td>") == sum(
        len(point.entries) for run in result.runs for point in run.points
    )


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", str(RECORDS[0]), "--html", str(tmp_path / "none" / "page.html")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fullshard_bench: error: ")
    assert "cannot be written" in said
