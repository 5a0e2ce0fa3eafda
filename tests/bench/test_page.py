"""A record as an HTML page: every contestant that may be compared has its bar and its row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fullshard_bench.cli import main
from fullshard_bench.records.result import read_result
from support.members import ROOT

RECORDS = sorted((ROOT / "benchmarks").glob("cpu-set_*.json"))


def _heights(figure: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {
        (bar["name"], mesh): height
        for bar in figure["data"]
        for mesh, height in zip(bar["x"], bar["y"], strict=True)
    }


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_drawn_as_a_page(record: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["draw", str(record), "--html", str(page)]) == 0
    text = page.read_text()
    figures = [json.loads(each) for each in re.findall(r"data-figure=[^>]*>(.*?)</script>", text)]
    result = read_result(record)
    assert len(figures) == 2 * len(result.runs)
    for run, steps, memory in zip(result.runs, figures[::2], figures[1::2], strict=True):
        ranked = {
            (entry.name, f"{point.kind} {point.mesh}"): entry
            for point in run.points
            for entry in point.entries
            if entry.is_ranked
        }
        assert _heights(steps) == {
            place: entry.derived.step_ms.value for place, entry in ranked.items() if entry.derived
        }
        assert _heights(memory) == {
            place: entry.figures.memory["peak"] / 2**20
            for place, entry in ranked.items()
            if entry.figures
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
