"""Ranks as hosts: they meet over the link, and nothing of it is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from bench.measured import settings
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.job import Job
from fullshard_bench.launching.launch import run_jobs
from fullshard_bench.launching.network import Hosts, bytes_sent, check_network
from support.python import environment

_SEND = """
import socket, time
from fullshard_bench.launching.network import bytes_sent

before, deadline = bytes_sent(), time.monotonic() + 10
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for _ in range(50):
        sender.sendto(bytes(1000), ("10.78.0.2", 9))
while bytes_sent() - before < 50 * 1000 and time.monotonic() < deadline:
    time.sleep(0.01)  # the first waits for an answer to where the other host is
print(bytes_sent() - before)
"""


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


@pytest.mark.matrix
@pytest.mark.usefixtures("allowed")
def test_ranks_meet_over_a_slow_link_and_the_hosts_are_gone_afterwards() -> None:
    chosen = settings(network="100mbit", impl=("fullshard", "none"), exposed=False)
    job = Job(settings=chosen, kind="mesh", mesh="2", trace=False)
    (found,) = run_jobs([job], lambda *_: None)
    point = found.point
    assert [entry.status for entry in point.entries] == ["ok", "ok"]
    assert f"fsb-{os.getpid()}-" not in _namespaces()


@pytest.mark.matrix
@pytest.mark.usefixtures("allowed")
def test_of_two_hosts_of_two_ranks_less_leaves_one_that_talks_once() -> None:
    names = ("fullshard", "fullshard_bench.slow_links:hosts", "none")
    model = "many:groups=4,width=256"
    chosen = settings(model=model, network="1gbit", ranks_per_host=2, impl=names, exposed=False)
    (found,) = run_jobs([Job(settings=chosen, kind="mesh", mesh="4", trace=False)], lambda *_: None)
    assert [entry.status for entry in found.point.entries] == ["ok"] * 3
    flat, once, none = (entry.figures.left_bytes for entry in found.point.entries if entry.figures)
    assert flat > once > none > 0
    assert once < 1.6 * found.parameter_bytes  # 1.5, headers, the norm


@pytest.mark.usefixtures("allowed")
def test_what_leaves_a_host_is_counted_on_its_link() -> None:
    with Hosts(2, "100mbit") as hosts:
        words = [*hosts.prefix(0), sys.executable, "-c", _SEND]
        said = subprocess.check_output(words, env=environment())
    assert 50 * 1000 < int(said) < 60 * 1000
    assert bytes_sent() is None


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
