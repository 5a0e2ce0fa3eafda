"""The command ``plan``: a row for each mesh and choice, curves, and what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fullshard_bench.cli import main

WORDS = ["plan", "--jobs", "1", "--model", "gpt-tiny", "--tokens", "32", "--mesh", "4"]


def _rows(printed: str) -> list[list[str]]:
    table = [line.split("│") for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row[1:-1]] for row in table]


def test_each_mesh_and_choice_has_a_row_and_the_first_that_fits_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["2x8", "--checkpointing", "no", "yes", "--dtype", "float32", "--budget", "1GiB"]
    assert main([*WORDS, *words]) == 0
    printed = capsys.readouterr().out
    rows = _rows(printed)
    choices = ["defaults", "recompute"]
    assert [row[:2] for row in rows] == [[mesh, each] for mesh in ("4", "2x8") for each in choices]
    assert {row[-1] for row in rows} == {"yes"}
    assert "The first that fits 1.00 GiB: 4 ranks, defaults." in printed
    peaks = [float(row[2].split()[0]) for row in rows]
    assert peaks[1] < peaks[0]


def test_on_a_device_the_quickest_that_fits_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--device", "h100", "--reshard", "default", "never"]) == 0
    printed = capsys.readouterr().out
    rows = _rows(printed)
    speeds = [float(row[7]) for row in rows]
    best = rows[speeds.index(max(speeds))]
    assert f"The quickest that fits 74.51 GiB: 4 ranks, {best[1]}, {best[7]} tokens/s" in printed
    assert all(row[6].endswith("%") and row[3].endswith("ms") for row in rows)


def test_meshes_are_curves_and_files_have_all_that_was_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["8", "2x8", "--device", "h100", "--offload", "no", "yes", "--out"]
    assert main([*WORDS, *words, str(tmp_path / "tiny")]) == 0
    printed = capsys.readouterr().out
    assert "host" in next(line for line in printed.splitlines() if "choices" in line)
    table = (tmp_path / "tiny.md").read_text()
    weak, strong = table.split("### Weak scaling: ")[1].split("### Strong scaling: ")
    assert weak.startswith("128 tokens on each rank")
    assert strong.startswith("2,048 tokens on all ranks together")
    weak_rows, strong_rows = (
        [
            line.split(" | ")
            for line in each.splitlines()
            if line.startswith(("| 4", "| 8", "| 2x8"))
        ]
        for each in (weak, strong)
    )
    assert [row[0] for row in weak_rows] == ["| 4", "| 8", "| 2x8"]
    assert [row[3] for row in strong_rows] == ["4", "2", "1"], "micro-batches of a shared batch"
    seconds = [float(row[4].removesuffix(" s")) for row in strong_rows]
    assert seconds == sorted(seconds, reverse=True)
    for name in ("tiny.png", "tiny_best.png"):
        assert f"]({name})" in table
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "The quickest that fits" in table
    assert json.loads((tmp_path / "tiny_best.json").read_text())["traceEvents"]


def test_without_choices_one_thing_at_a_time_is_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--rows", "2"]) == 0
    printed = capsys.readouterr().out
    assert [row[1] for row in _rows(printed)] == [
        "bfloat16",
        "bfloat16, keep gathered",
        "bfloat16, recompute",
        "bfloat16, keep gathered, recompute",
        "bfloat16, prefetch 2",
        "bfloat16, groups of 2",
        "bfloat16, 2 micro-batches",
        "bfloat16, offload",
        "defaults",
    ]
    assert "Ranks on accelerators; --device names one" in printed


@pytest.mark.slow
def test_several_processes_plan_what_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--reshard", "default", "never", "--dtype", "bfloat16"]
    assert main([*WORDS, *words]) == 0
    alone = _rows(capsys.readouterr().out)
    assert main([*WORDS, *words, "--jobs", "2"]) == 0
    assert _rows(capsys.readouterr().out) == alone
    assert [row[1] for row in alone] == ["bfloat16", "bfloat16, keep gathered"]


def test_a_mixture_of_experts_is_planned_if_each_expert_takes_a_fixed_number_of_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--model", "moe", "--group", "1"]) == 0
    assert len(_rows(capsys.readouterr().out)) == 1
    assert main([*WORDS, "--model", "experts", "--group", "1"]) == 2
    assert "a fixed number of tokens" in capsys.readouterr().err


def test_a_budget_that_none_fits_is_said_with_the_least(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--group", "1", "--budget", "1KiB"]) == 0
    assert "None fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--mesh", "0"],
        ["--mesh", "4", "--budget", "much"],
        ["--mesh", "4", "--reshard", "often"],
        ["--mesh", "4", "--micro-batches", "3"],
        ["--mesh", "4", "--rows", "2", "--micro-batches", "3"],
        ["--mesh", "4", "--group", "0"],
        ["--mesh", "4", "--model", "gpt-9t"],
        ["--mesh", "4", "--device", "z900"],
    ],
)
def test_a_wrong_word_is_named_before_anything_is_planned(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert words[-1] in capsys.readouterr().err
