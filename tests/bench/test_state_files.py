"""`python -m fullshard_bench state-files`: what it measures, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fullshard_bench.cli import main


@pytest.mark.matrix
def test_both_sides_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "gpt-tiny", "--turns", "1", "--folder", str(tmp_path)]
    assert main(["state-files", *given]) == 0
    rows = re.findall(r"(?m)^\| gpt-tiny \| (\w+) \| ([\d.]+) \|", capsys.readouterr().out)
    assert [side for side, _ in rows] == ["memory", "files"]
    assert all(float(milliseconds) > 0 for _, milliseconds in rows)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_bucket_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["state-files", "--folder", str(tmp_path), "--bucket-mb", "0"]) == 2
    assert "bucket_mb is 0.0; pass a positive number" in capsys.readouterr().err
