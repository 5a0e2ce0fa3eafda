"""Two hosts, each with a network of its own, started as docs/how-to/several-hosts.md says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard_train.checkpoints.store import verify
from fullshard_train.cli import main
from fullshard_train.reporting.metrics import read_metrics
from support.members import ROOT
from train.jobs import TEXT, losses, settings
from train.launchers import environment

PAGE = ROOT / "docs" / "how-to" / "several-hosts.md"


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2, both `cable`."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program ip (iproute2)")
    names = [f"fullshard-{os.getpid()}-{host}" for host in range(2)]
    try:
        for name in names:
            made = _ip("netns", "add", name)
            if made.returncode:
                pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
        peer = ("peer", "name", "cable", "netns", names[1])
        steps: list[tuple[str, ...]] = [
            ("link", "add", "cable", "netns", names[0], "type", "veth", *peer)
        ]
        for number, name in enumerate(names, start=1):
            steps += [
                ("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable"),
                ("-n", name, "link", "set", "cable", "up"),
                ("-n", name, "link", "set", "lo", "up"),
            ]
        for step in steps:
            done = _ip(*step)
            if done.returncode:
                pytest.skip(f"ip {' '.join(step)}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            _ip("netns", "delete", name)


def _command(host: int) -> list[str]:
    """What the page tells to start on a host, with the addresses of the namespaces."""
    line = next(line for line in PAGE.read_text().splitlines() if "--node-rank=0" in line)
    for shown, meant in (
        ("--node-rank=0", f"--node-rank={host}"),
        ("--nproc-per-node=8", "--nproc-per-node=1"),
        ("10.0.0.1", "10.77.0.1"),
        (" --resume auto --out /shared/run", ""),
    ):
        assert shown in line, f"{PAGE} no longer shows {shown}"
        line = line.replace(shown, meant)
    return [sys.executable, "-m", "torch.distributed.run", *line.split()[1:]]


@pytest.mark.slow
def test_two_hosts_train_as_one_process_does(hosts: list[str], tmp_path: Path) -> None:
    text, run, alone = tmp_path / "text.txt", tmp_path / "run", tmp_path / "alone"
    text.write_bytes(TEXT)
    words = [*settings(), "--data", str(text)]
    where = {"GLOO_SOCKET_IFNAME": "cable", "TP_SOCKET_IFNAME": "cable"}
    outputs = [tmp_path / f"output-{host}" for host in range(2)]
    processes = []
    for host, name in enumerate(hosts):
        inside = ["ip", "netns", "exec", name]
        with outputs[host].open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [*inside, *_command(host), *words, "--resume", "auto", "--out", str(run)],
                    env={**environment(), **where},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = [output.read_text() for output in outputs]
    assert codes == [0, 0], "\n".join(told)
    assert "over 2 rank(s)" in told[0]
    assert "rank(s)" not in told[1]
    verify(run / "checkpoints" / "step-00000004")
    assert main([*words, "--out", str(alone)]) == 0
    found = losses(read_metrics(run / "metrics.jsonl"))
    assert found == pytest.approx(losses(read_metrics(alone / "metrics.jsonl")), rel=1e-5)
