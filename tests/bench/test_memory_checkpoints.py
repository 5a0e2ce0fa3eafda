"""`python -m fullshard_bench memory-checkpoints`: what it measures, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fullshard_bench.cli import main


@pytest.mark.matrix
def test_both_sides_are_measured_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {*Path("/dev/shm").iterdir()}
    given = ["--model", "gpt-tiny", "--ranks", "2", "--rounds", "1", "--folder", str(tmp_path)]
    output = tmp_path / "result.json"
    assert main(["memory-checkpoints", *given, "--output", str(output)]) == 0
    rows = re.findall(r"(?m)^\| gpt-tiny \| ([^|]+) \| ([\d.]+) \|", capsys.readouterr().out)
    assert len(rows) == 5
    assert all(float(milliseconds) > 0 for _, milliseconds in rows)
    assert json.loads(output.read_text())["models"]["gpt-tiny"]["mib"] > 0
    assert {*tmp_path.iterdir()} == {output, output.with_suffix(".md")}
    assert {*Path("/dev/shm").iterdir()} <= before


def test_ranks_that_make_no_two_hosts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory-checkpoints", "--folder", str(tmp_path), "--ranks", "3"]) == 2
    assert "--ranks 3: must be even, for two hosts" in capsys.readouterr().err
