"""Two hosts, each with a network of its own, started as docs/how-to/several-hosts.md says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard_train.checkpoints.store import verify
from fullshard_train.cli import main
from fullshard_train.reporting.metrics import read_metrics
from support.members import ROOT
from support.trainer.hosts import Host, NoHosts, two_hosts
from support.trainer.jobs import losses, settings

PAGE = ROOT / "docs" / "how-to" / "several-hosts.md"


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts; skipped where they cannot be made."""
    try:
        with two_hosts() as made:
            yield made
    except NoHosts as error:
        pytest.skip(str(error))


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


@pytest.mark.matrix
def test_two_hosts_train_as_one_process_does(hosts: list[Host], text: Path, tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    words = [*settings(), "--data", str(text)]
    outputs = [tmp_path / f"output-{host}" for host in range(2)]
    processes = [
        host.start([*_command(n), *words, "--resume", "auto", "--out", str(run)], outputs[n])
        for n, host in enumerate(hosts)
    ]
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
