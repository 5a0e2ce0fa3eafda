"""Ranks as hosts: network namespaces joined by a switch, with links of limited rate.

Owns making and removing them, and the count of what leaves one. A host has a separate network,
name, and shared memory, so that only the link connects its ranks to the other ranks. Needs root and
iproute2.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from fullshard_bench.errors import BenchError

__all__ = ["Hosts", "bytes_sent", "check_network"]

_RATE = re.compile(r"([1-9]\d*)(mbit|gbit)")
_NETWORK = "10.78.0"
_CABLE = "cable"


def check_network(rate: str) -> None:
    """Raise at once what making hosts would raise later.

    Raises:
        BenchError: the rate is none, or this machine cannot make hosts.
    """
    _bits(rate)
    if os.geteuid() != 0:
        raise BenchError(
            f"--network {rate}: network namespaces need root; run as root, or leave --network out"
        )
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        raise BenchError(
            f"--network {rate}: needs {', '.join(missing)} (of iproute2 and util-linux); install it"
            " or leave --network out"
        )


def bytes_sent() -> int | None:
    """Return the bytes that this host has sent over its link, with headers; None without a link."""
    for line in Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == _CABLE:
            return int(counts.split()[8])  # after eight counts of what was received
    return None


def _bits(rate: str) -> int:
    match = _RATE.fullmatch(rate)
    if match is None:
        raise BenchError(f"--network {rate!r}: must be a rate such as 1gbit or 100mbit")
    return int(match[1]) * {"mbit": 10**6, "gbit": 10**9}[match[2]]


class Hosts:
    """Context with `count` hosts around a switch.

    Args:
        count: how many, at most 250.
        rate: of what each may send, such as 1gbit.
    """

    def __init__(self, count: int, rate: str) -> None:
        self._rate = rate
        self._burst = max(_bits(rate) // 8 // 1000, 128 * 1024)  # bytes: a millisecond's worth
        self._switch = f"fsb-{os.getpid()}-switch"
        self._names = [f"fsb-{os.getpid()}-{number}" for number in range(count)]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make ranks use the cable."""
        return {"GLOO_SOCKET_IFNAME": _CABLE, "NCCL_SOCKET_IFNAME": _CABLE}

    def prefix(self, number: int) -> list[str]:
        """The command that runs the rest of its line on a host."""
        inside = 'hostname "$0" && mount -t tmpfs none /dev/shm && exec "$@"'
        unshare = ["unshare", "--uts", "--ipc", "--mount", "sh", "-c", inside]
        return ["ip", "netns", "exec", self._names[number], *unshare, f"host{number}"]

    def __enter__(self) -> Hosts:
        """Make the hosts.

        Raises:
            BenchError: a step failed; what was made is removed.
        """
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the hosts."""
        self._remove()

    def _make(self) -> None:
        self._do("netns", "add", self._switch)
        self._do("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        self._do("-n", self._switch, "link", "set", "bridge", "up")
        for number, name in enumerate(self._names):
            port = f"port{number}"
            self._do("netns", "add", name)
            peer = ("peer", "name", port, "netns", self._switch)
            self._do("link", "add", _CABLE, "netns", name, "type", "veth", *peer)
            self._do("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            address = f"{_NETWORK}.{number + 1}/24"
            self._do("-n", name, "address", "add", address, "dev", _CABLE)
            self._do("-n", name, "link", "set", _CABLE, "up")
            self._do("-n", name, "link", "set", "lo", "up")
            limit = ("rate", self._rate, "burst", str(self._burst), "latency", "50ms")
            self._do(
                "netns", "exec", name, "tc", "qdisc", "add", "dev", _CABLE, "root", "tbf", *limit
            )

    def _do(self, *words: str) -> None:
        done = _ip(words)
        if done.returncode:
            raise BenchError(
                f"--network {self._rate}: ip {' '.join(words)}: {done.stderr.strip()}; this machine"
                " does not allow network namespaces, so leave --network out"
            )

    def _remove(self) -> None:
        for name in (*self._names, self._switch):
            _ip(("netns", "delete", name))


def _ip(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
