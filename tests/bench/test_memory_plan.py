"""The command ``plan``: a row for each mesh and choice, and what fits."""

from __future__ import annotations

import pytest

from fullshard_bench.cli import main
from fullshard_bench.errors import BenchError
from fullshard_bench.memory_plan import parse_bytes

WORDS = ["plan", "--jobs", "1", "--model", "gpt-tiny", "--tokens", "32", "--mesh", "4"]


def _rows(printed: str) -> list[list[str]]:
    table = [line.split("│") for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row[1:-1]] for row in table]


def test_each_mesh_and_choice_has_a_row_and_the_first_that_fits_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["2x8", "--checkpointing", "no", "yes", "--budget", "1GiB"]
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
    speeds = [float(row[6]) for row in rows]
    best = rows[speeds.index(max(speeds))]
    assert f"The quickest that fits 74.51 GiB: 4 ranks, {best[1]}, {best[6]} tokens/s" in printed
    assert all(row[5].endswith("%") and row[3].endswith("ms") for row in rows)


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
    assert main([*WORDS, "--model", "moe"]) == 0
    assert len(_rows(capsys.readouterr().out)) == 1
    assert main([*WORDS, "--model", "experts"]) == 2
    assert "a fixed number of tokens" in capsys.readouterr().err


def test_a_budget_that_none_fits_is_said_with_the_least(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--budget", "1KiB"]) == 0
    assert "None fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--mesh", "0"],
        ["--mesh", "4", "--budget", "much"],
        ["--mesh", "4", "--reshard", "often"],
        ["--mesh", "4", "--micro-batches", "3"],
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


def test_sizes_are_read_in_binary_units() -> None:
    assert parse_bytes("80GiB") == 80 * 2**30
    assert parse_bytes("1.5 MiB") == 3 * 2**19
    assert parse_bytes("512") == 512
    with pytest.raises(BenchError, match="80GiB"):
        parse_bytes("80GB")
