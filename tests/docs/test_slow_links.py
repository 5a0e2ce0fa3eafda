"""The table of the page "Slow links" is what its record says."""

from __future__ import annotations

from fullshard_bench.result import read_result
from support.members import ROOT

RECORD = ROOT / "benchmarks" / "wire" / "gpt-small_1gbit_2-core-epyc_2026-11-23.json"
PAGE = ROOT / "docs" / "how-to" / "slow-links.md"
SLOW = "fullshard_bench.slow_links"
ROWS = {
    "torch, fp32": "torch",
    "torch, bf16": f"{SLOW}:torch_bf16",
    "fullshard, fp32": "fullshard",
    "the same, gathered ahead": f"{SLOW}:ahead",
    "fullshard, bf16 on the wire": f"{SLOW}:bf16",
    "the same, gathered ahead, as above": f"{SLOW}:bf16_ahead",
}


def rows_of_the_record() -> list[str]:
    """The rows of the table: step, and what it takes beyond the unsharded step, of torch's two."""
    (run,) = read_result(RECORD).runs
    (point,) = run.points
    steps = {each.name: each.derived.step_ms.value for each in point.entries if each.derived}
    plain = steps.pop("none")
    over = {name: step - plain for name, step in steps.items()}
    assert over.keys() == set(ROWS.values())
    return [
        f"| {row} | {steps[name]:.0f} | {over[name] / over['torch']:.2f} "
        f"| {over[name] / over[f'{SLOW}:torch_bf16']:.2f} |"
        for row, name in ROWS.items()
    ]


def test_the_table_is_the_records() -> None:
    page = PAGE.read_text()
    for row in rows_of_the_record():
        assert row in page, "\n".join(rows_of_the_record())


def test_the_page_links_to_the_record_and_the_record_agreed_with_the_unsharded_model() -> None:
    assert f"../../benchmarks/wire/{RECORD.stem}.md" in PAGE.read_text()
    entries = read_result(RECORD).runs[0].points[0].entries
    assert {each.status for each in entries} <= {"ok", "unchecked"}
