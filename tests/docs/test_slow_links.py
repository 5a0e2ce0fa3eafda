"""The tables of the page "Slow links" are what their records say."""

from __future__ import annotations

import json
import statistics

import pytest

from fullshard_bench.records.result import read_result
from support.members import ROOT

PAGE = ROOT / "docs" / "how-to" / "slow-links.md"
SLOW = "fullshard_bench.slow_links"
LONG = "gpt-small_1gbit_2-core-epyc_2026-11-23"
SHORT = "gpt-small-16_1gbit_2-core-epyc_2026-11-23"
HOSTS = "hosts_1gbit_2-core-epyc_2026-11-23"
FORMS, FORMS_SLOWER = (f"forms_{link}_2-core-epyc_2026-11-26" for link in ("1gbit", "100mbit"))
LOSSES = "held-out_2-ranks_2026-11-24"
_FORMS = {
    "torch, fp32": "torch",
    "fullshard, fp32": "fullshard",
    "bf16 both ways": f"{SLOW}:bf16",
    "int8 weights, bf16 gradients": f"{SLOW}:int8",
    "e4m3 weights, bf16 gradients": f"{SLOW}:e4m3",
    "int8 both ways, error feedback": f"{SLOW}:int8_feedback",
}
ROWS = {
    LONG: {
        "torch, fp32": "torch",
        "torch, bf16": f"{SLOW}:torch_bf16",
        "fullshard, fp32": "fullshard",
        "the same, gathered ahead": f"{SLOW}:ahead",
        "fullshard, bf16 on the wire": f"{SLOW}:bf16",
        "the same, gathered ahead, as above": f"{SLOW}:bf16_ahead",
    },
    SHORT: {
        "fp32": "fullshard",
        "bf16 both ways": f"{SLOW}:bf16",
        "bf16, ahead": f"{SLOW}:bf16_ahead",
        "int8 weights, bf16 gradients": f"{SLOW}:int8",
        "int8 and bf16, ahead": f"{SLOW}:int8_ahead",
    },
    FORMS: _FORMS
    | {
        "fp32, gathered ahead": f"{SLOW}:ahead",
        "bf16 both ways, ahead": f"{SLOW}:bf16_ahead",
        "int8 and bf16, ahead": f"{SLOW}:int8_ahead",
    },
    FORMS_SLOWER: _FORMS,
    HOSTS: {
        "torch, four ranks": "torch",
        "fullshard, four ranks": "fullshard",
        "with `hosts=2`": f"{SLOW}:hosts",
        "with `hosts=2`, bf16 both ways": f"{SLOW}:hosts_bf16",
    },
}
AGAINST = {
    LONG: ("torch", f"{SLOW}:torch_bf16"),
    SHORT: (f"{SLOW}:bf16", f"{SLOW}:bf16_ahead"),
    FORMS: ("torch", f"{SLOW}:bf16"),
    FORMS_SLOWER: ("torch", f"{SLOW}:bf16"),
    HOSTS: ("fullshard", "torch"),
}


def rows_of(record: str) -> list[str]:
    """The rows of a table: step, and what it takes beyond the unsharded step, of two others'."""
    (run,) = read_result(ROOT / "benchmarks" / "wire" / f"{record}.json").runs
    (point,) = run.points
    steps = {each.name: each.derived.step_ms.value for each in point.entries if each.derived}
    plain = steps.pop("none")
    over = {name: step - plain for name, step in steps.items()}
    rows, (first, second) = ROWS[record], AGAINST[record]
    assert over.keys() == set(rows.values())
    return [
        f"| {row} | {steps[name]:.0f} | {over[name] / over[first]:.2f} "
        f"| {over[name] / over[second]:.2f} |"
        for row, name in rows.items()
    ]


@pytest.mark.parametrize("record", ROWS)
def test_a_table_is_its_records(record: str) -> None:
    page = PAGE.read_text()
    for row in rows_of(record):
        assert row in page, "\n".join(rows_of(record))


@pytest.mark.parametrize("record", ROWS)
def test_the_page_links_to_a_record_and_it_agreed_with_the_unsharded_model(record: str) -> None:
    assert f"../../benchmarks/wire/{record}.md" in PAGE.read_text()
    entries = read_result(ROOT / "benchmarks" / "wire" / f"{record}.json").runs[0].points[0].entries
    assert {each.status for each in entries} <= {"ok", "unchecked"}


def test_held_out_losses_are_the_records() -> None:
    record = json.loads((ROOT / "benchmarks" / "wire" / f"{LOSSES}.json").read_text())
    ends = {
        run["name"].partition(", ")[2].removesuffix(" on the wire") or "as computed": {
            seed: losses[-1]
            for seed, losses in zip(run["seeds"], run["held_out_losses"], strict=True)
        }
        for run in record["runs"]
    }
    exact = ends["as computed"]
    page = PAGE.read_text()
    for form, by_seed in ends.items():
        row = f"| {form} | {len(by_seed)} | {statistics.fmean(by_seed.values()):.4f} |"
        if by_seed is not exact:
            more = [100 * (loss / exact[seed] - 1) for seed, loss in by_seed.items()]
            row += f" {statistics.fmean(more):+.2f} % ({min(more):+.2f} to {max(more):+.2f}) |"
        assert row in page, row
    half = [100 * (loss / exact[seed] - 1) for seed, loss in ends["bfloat16"].items()]
    error = statistics.stdev(half) / len(half) ** 0.5
    assert (
        f"{statistics.fmean(half):.2f} % on average with a standard error of {error:.2f} %" in page
    )


def test_where_norms_are_rounded_the_first_steps_lag_alike_on_all_seeds() -> None:
    record = ROOT / "benchmarks" / "wire" / "first-steps_2-ranks_2026-11-24.json"
    runs = json.loads(record.read_text())["runs"]
    losses = {(run["travels"], run["seed"]): run["losses"] for run in runs}

    def beside_exact(travels: str) -> list[list[float]]:
        return [
            [
                100 * (loss / exact - 1)
                for loss, exact in zip(each, losses["as computed", seed], strict=True)
            ]
            for (name, seed), each in losses.items()
            if name == travels
        ]

    ninth = [more[8] for more in beside_exact("bfloat16, norms and biases, too")]
    said = f"by {min(ninth):.2f} to {max(ninth):.2f} % at the ninth step"
    assert len(ninth) == 4 and said in PAGE.read_text()
    kept = beside_exact("bfloat16, norms and biases exact")
    assert len(kept) == 4 and max(abs(more) for each in kept for more in each) < 0.03
