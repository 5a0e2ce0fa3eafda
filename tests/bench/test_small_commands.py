"""Commands that measure one thing: what they print, what they leave, and what they refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fullshard_bench.cli import main
from support.python import run_python


@pytest.mark.matrix
def test_memory_checkpoints_are_measured_on_both_sides_and_nothing_is_left(
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


@pytest.mark.matrix
def test_each_call_for_a_state_dict_is_timed_on_both_sides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["state-dicts", "--model", "gpt-tiny", "--rounds", "1"]) == 0
    rows = re.findall(
        r"(?m)^\| gpt-tiny \| (.+?) \| ([\d.]+) \| ([\d.]+) \|", capsys.readouterr().out
    )
    assert len(rows) == 4
    assert all(float(ours) > 0 and float(theirs) > 0 for _, ours, theirs in rows)


@pytest.mark.matrix
@pytest.mark.parametrize("option", [[], ["--no-shared-memory"]], ids=["shared", "not"])
def test_all_sides_of_state_in_files_are_measured(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", "gpt-tiny", "--turns", "1", "--folder", str(tmp_path), *option]
    assert main(["state-files", *given, "--micro-batches", "2", "--disk-mb-s", "500"]) == 0
    text = capsys.readouterr().out
    rows = re.findall(r"(?m)^\| gpt-tiny \| (\w+) \| ([\d.]+) \|", text)
    assert [side for side, _ in rows] == ["none", "memory", "beside", "files", "all"]
    assert all(float(milliseconds) >= 0 for _, milliseconds in rows)
    shared = [row.split(" | ")[7] for row in re.findall(r"(?m)^\| gpt-tiny .*$", text)]
    assert [float(mib) > 0 for mib in shared] == [not option] * len(rows)
    assert ("2 ranks without shared memory" in text) == bool(option)
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
    seconds = float(run_python("-c", program, tmp_path / "file"))
    assert seconds >= 0.2  # 200 kB at 1 MB per second, and never less


def test_a_wrong_bucket_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["state-files", "--folder", str(tmp_path), "--bucket-mb", "0"]) == 2
    assert "bucket_mb is 0.0; pass a positive number" in capsys.readouterr().err
