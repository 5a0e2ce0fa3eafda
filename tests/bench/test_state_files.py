"""`python -m fullshard_bench state-files`: what it measures, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fullshard_bench.cli import main


@pytest.mark.matrix
def test_all_sides_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "gpt-tiny", "--turns", "1", "--folder", str(tmp_path)]
    assert main(["state-files", *given, "--micro-batches", "2", "--disk-mb-s", "500"]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"(?m)^\| gpt-tiny \| (\w+) \| ([\d.]+) \|", text)
    assert [side for side, _ in rows] == ["none", "memory", "beside", "files", "all"]
    assert all(float(milliseconds) >= 0 for _, milliseconds in rows)
    for bar in (
        "the larger of computing and I/O",
        "forward and backward alone",
        "the peak with state in files",
        "the peak with parameters, gradients and state in files",
    ):
        assert len(re.findall(rf"(?m)^- gpt-tiny: .*{bar}", text)) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.matrix
def test_a_disk_held_to_a_rate_moves_that_many_bytes_in_a_second(tmp_path: Path) -> None:
    """All threads share the rate: two calls at once take as long as one after the other."""
    program = (
        "import os, sys, time, threading\n"
        "from fullshard_bench.measuring.state_files import _hold_disk_to\n"
        "began = time.perf_counter()\n"
        "_hold_disk_to(1e6)\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "write = lambda: os.pwritev(fd, [bytes(50_000)], 0)\n"
        "threads = [threading.Thread(target=write) for _ in range(4)]\n"
        "[each.start() for each in threads], [each.join() for each in threads]\n"
        "print(time.perf_counter() - began)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "file")],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert float(ended.stdout) >= 0.2  # 200 kB at 1 MB per second, and never less


def test_a_wrong_bucket_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["state-files", "--folder", str(tmp_path), "--bucket-mb", "0"]) == 2
    assert "bucket_mb is 0.0; pass a positive number" in capsys.readouterr().err
