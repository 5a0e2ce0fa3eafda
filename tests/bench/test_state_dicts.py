"""`python -m fullshard_bench state-dicts`: what it measures."""

from __future__ import annotations

import re

import pytest

from fullshard_bench.cli import main


@pytest.mark.matrix
def test_each_call_is_timed_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state-dicts", "--model", "gpt-tiny", "--rounds", "1"]) == 0
    rows = re.findall(
        r"(?m)^\| gpt-tiny \| (.+?) \| ([\d.]+) \| ([\d.]+) \|", capsys.readouterr().out
    )
    assert len(rows) == 4
    assert all(float(ours) > 0 and float(theirs) > 0 for _, ours, theirs in rows)
