"""The command ``plan``: a row for each mesh and choice, and what fits."""

from __future__ import annotations

import pytest

from fullshard_bench.cli import main
from fullshard_bench.errors import BenchError
from fullshard_bench.memory_plan import parse_bytes

WORDS = ["plan", "--model", "gpt-tiny", "--tokens", "32", "--mesh", "4", "2x8"]


def test_each_mesh_and_choice_has_a_row_and_the_first_that_fits_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--checkpointing", "no", "yes", "--budget", "1GiB"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if "float32" in line and "MiB" in line]
    assert [(row[1], row[7]) for row in rows] == [
        ("4", "no"), ("4", "yes"), ("2x8", "no"), ("2x8", "yes"),
    ]  # fmt: skip
    assert "The first that fits 1.00 GiB: 4 ranks" in printed


def test_a_budget_that_none_fits_is_said_with_the_least(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--budget", "1KiB"]) == 0
    assert "None fits" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--mesh", "0"], ["--mesh", "4", "--budget", "much"]])
def test_a_mesh_or_budget_that_is_none_is_refused(
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
