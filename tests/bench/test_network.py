"""Ranks as hosts: they meet over the link, and nothing of it is left."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from bench.measured import settings
from fullshard_bench.errors import BenchError
from fullshard_bench.job import Job
from fullshard_bench.launch import run_jobs
from fullshard_bench.network import Hosts, check_network


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.fixture
def allowed() -> None:
    """Skips where this machine cannot make hosts."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    try:
        with Hosts(1, "1gbit"):
            pass
    except BenchError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_ranks_meet_over_a_slow_link_and_the_hosts_are_gone_afterwards() -> None:
    chosen = settings(network="100mbit", impl=("fullshard", "none"), exposed=False)
    job = Job(settings=chosen, kind="mesh", mesh="2", trace=False)
    (found,) = run_jobs([job], lambda *_: None)
    point = found.point
    assert [entry.status for entry in point.entries] == ["ok", "ok"]
    assert f"fsb-{os.getpid()}-" not in _namespaces()


@pytest.mark.usefixtures("allowed")
def test_a_host_has_a_name_and_a_rate_of_its_own() -> None:
    with Hosts(2, "100mbit") as hosts:
        words = [*hosts.prefix(1), "sh", "-c", "hostname; tc qdisc show dev cable"]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[0] == "host1"
    assert "rate 100Mbit" in said
    assert f"fsb-{os.getpid()}-" not in _namespaces()


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(BenchError, match="need root"):
        check_network("1gbit")


def test_without_the_programs_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None if name == "tc" else name)
    with pytest.raises(BenchError, match=r"needs tc \("):
        check_network("1gbit")
