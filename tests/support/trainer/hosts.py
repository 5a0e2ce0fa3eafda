"""Hosts that one machine can make: network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.python import environment

_CABLE = "cable"


class NoHosts(Exception):
    """This machine does not let us make network namespaces; the message says why."""


def _ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Host:
    """A network of its own, called `name`, with the address `address` at its end of the cable."""

    name: str
    address: str

    def start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Starts a command here; what it prints is added to a file."""
        where = {"GLOO_SOCKET_IFNAME": _CABLE, "TP_SOCKET_IFNAME": _CABLE}
        with output.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                env={**environment(), **where},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> list[int]:
        """Every process that runs here."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).stdout.split()]

    def power_off(self) -> None:
        """Cuts the cable, then kills every process: nobody is told, not even by a closed socket."""
        _ip("-n", self.name, "link", "set", _CABLE, "down")
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def power_on(self) -> None:
        """Plugs the cable in again; nothing runs here."""
        _ip("-n", self.name, "link", "set", _CABLE, "up")


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Two hosts, 10.77.0.1 and 10.77.0.2; what still runs there at the end is killed.

    Raises:
        NoHosts: they cannot be made.
    """
    if os.geteuid() != 0:
        raise NoHosts("network namespaces need root")
    if shutil.which("ip") is None:
        raise NoHosts("network namespaces need the program ip (iproute2)")
    hosts = [Host(f"fullshard-{os.getpid()}-{host}", f"10.77.0.{host + 1}") for host in range(2)]
    try:
        for host in hosts:
            _require(_ip("netns", "add", host.name), "network namespaces are not allowed here")
        peer = ("peer", "name", _CABLE, "netns", hosts[1].name)
        first = ("link", "add", _CABLE, "netns", hosts[0].name, "type", "veth", *peer)
        _require(_ip(*first), "no cable")
        for host in hosts:
            inside = ("-n", host.name)
            address = ("address", "add", f"{host.address}/24", "dev", _CABLE)
            _require(_ip(*inside, *address), "no address")
            for device in (_CABLE, "lo"):
                _require(_ip(*inside, "link", "set", device, "up"), f"{device} stays down")
        yield hosts
    finally:
        for host in hosts:
            host.power_off()
            _ip("netns", "delete", host.name)


def _require(done: subprocess.CompletedProcess[str], wrong: str) -> None:
    if done.returncode:
        raise NoHosts(f"{wrong}: {done.stderr.strip()}")
