"""What offload takes: copies between a device and its host, and work on the host's own memory.

Owns the description of a host and its formulas: a latency and a bandwidth for a copy, the bytes of
the operands for work. Refuses FLOPs of a host: optimizers, which are what runs there, are bound by
its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PCIE_4", "PCIE_5", "Host", "host_seconds", "transfer_seconds"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host's part for one device.

    Attributes:
        link: what connects the device to it.
        bandwidth: bytes per second of that link in each direction, with the other direction in use.
        latency: seconds of a copy without bytes.
        memory: bytes per second of its memory, shared out among its devices.
    """

    link: str
    bandwidth: float
    latency: float
    memory: float


PCIE_4 = Host(link="PCIe 4", bandwidth=32e9, latency=10e-6, memory=51e9)
PCIE_5 = Host(link="PCIe 5", bandwidth=64e9, latency=10e-6, memory=77e9)


def transfer_seconds(nbytes: int, host: Host, efficiency: float) -> float:
    """How long a copy takes, of page-locked memory.

    Args:
        nbytes: how much.
        host: between which and a device.
        efficiency: the part of the link's bandwidth that is reached.
    """
    return host.latency + nbytes / (host.bandwidth * efficiency)


def host_seconds(nbytes: int, host: Host, efficiency: float) -> float:
    """How long work on the host's memory takes.

    Args:
        nbytes: read and written.
        host: whose memory it is.
        efficiency: the part of the memory's bandwidth that is reached.
    """
    return nbytes / (host.memory * efficiency)
