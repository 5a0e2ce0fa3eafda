"""Devices and the links between them, as frozen descriptions with their sources.

Owns the figures that data sheets give, the latencies that NCCL assumes, and the efficiencies that
are assumed of kernels and links; the latter are stated, not measured. Refuses to time anything:
``kernels`` and ``collectives`` do that from a description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

__all__ = ["DEVICES", "Device", "Efficiency", "Link", "device_named"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects devices, of one host or of several.

    Attributes:
        name: what it is called.
        bandwidth: bytes per second that one device sends at the same time as it receives as many.
        latency: seconds of one step of a ring by large messages (NCCL's protocol Simple).
        short_latency: seconds of one step by short messages, at half the bandwidth (NCCL's LL).
    """

    name: str
    bandwidth: float
    latency: float
    short_latency: float


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Parts of a device's peaks that are assumed to be reached.

    Attributes:
        matmul: of FLOP/s in matrix products.
        attention: of FLOP/s in fused attention.
        memory: of the memory's bandwidth in all else.
        link: of a link's bandwidth.
    """

    matmul: float = 0.7
    attention: float = 0.45
    memory: float = 0.8
    link: float = 0.8


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, the host that drives it, and what it is connected by.

    Attributes:
        name: as ``device_named`` finds it.
        flops: FLOP/s by dtype, dense.
        memory: bytes.
        bandwidth: bytes per second of its memory.
        per_host: devices of one host.
        inside: the link between devices of one host.
        between: the link from one device to those of other hosts.
        attention: the fused kernel of attention that is assumed.
        launch: seconds that the host needs to launch one operation.
        shortest: seconds that the shortest kernel takes.
        start: seconds that a collective takes before its first step.
        synchronous: a kernel runs while the host waits: a CPU.
        efficiency: what is assumed to be reached.
        sources: where the figures are from.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    memory: float
    bandwidth: float
    per_host: int
    inside: Link
    between: Link
    attention: str
    launch: float = 6e-6
    shortest: float = 2e-6
    start: float = 8.4e-6
    synchronous: bool = False
    efficiency: Efficiency = field(default_factory=Efficiency)
    sources: tuple[str, ...] = ()

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s in a dtype; of one that is not described, those of float32."""
        return self.flops.get(dtype, self.flops[torch.float32])


def _flops(half: float, single: float) -> Mapping[torch.dtype, float]:
    return {torch.bfloat16: half, torch.float16: half, torch.float32: single, torch.float64: single}


_NCCL = "latencies: NCCL, src/graph/tuning.cc (hwLat, baseLat)"
_NVLINK = {"latency": 3.4e-6, "short_latency": 0.6e-6}
_NETWORK = {"latency": 14e-6, "short_latency": 2.7e-6}
_FLASH = "flash attention"


def _infiniband(gigabits: int) -> Link:
    return Link(name=f"{gigabits} Gbit/s network", bandwidth=gigabits * 1e9 / 8, **_NETWORK)


DEVICES: Mapping[str, Device] = MappingProxyType({
    each.name: each
    for each in (
        Device(
            name="a100",
            flops=_flops(312e12, 19.5e12),
            memory=80e9,
            bandwidth=2.039e12,
            per_host=8,
            inside=Link(name="NVLink 3", bandwidth=300e9, **_NVLINK),
            between=_infiniband(200),
            attention=_FLASH,
            sources=("NVIDIA A100 80GB SXM data sheet", "DGX A100 data sheet", _NCCL),
        ),
        Device(
            name="h100",
            flops=_flops(989.4e12, 66.9e12),
            memory=80e9,
            bandwidth=3.35e12,
            per_host=8,
            inside=Link(name="NVLink 4", bandwidth=450e9, **_NVLINK),
            between=_infiniband(400),
            attention=_FLASH,
            sources=("NVIDIA H100 SXM data sheet", "DGX H100 data sheet", _NCCL),
        ),
        Device(
            name="h200",
            flops=_flops(989.4e12, 66.9e12),
            memory=141e9,
            bandwidth=4.8e12,
            per_host=8,
            inside=Link(name="NVLink 4", bandwidth=450e9, **_NVLINK),
            between=_infiniband(400),
            attention=_FLASH,
            sources=("NVIDIA H200 SXM data sheet", "DGX H200 data sheet", _NCCL),
        ),
        Device(
            name="b200",
            flops=_flops(2250e12, 75e12),
            memory=180e9,
            bandwidth=8e12,
            per_host=8,
            inside=Link(name="NVLink 5", bandwidth=900e9, **_NVLINK),
            between=_infiniband(400),
            attention=_FLASH,
            sources=("NVIDIA HGX B200 data sheet", "DGX B200 data sheet", _NCCL),
        ),
        Device(
            name="mi300x",
            flops=_flops(1307.4e12, 163.4e12),
            memory=192e9,
            bandwidth=5.3e12,
            per_host=8,
            inside=Link(name="Infinity Fabric", bandwidth=448e9, **_NVLINK),
            between=_infiniband(400),
            attention=_FLASH,
            sources=(
                "AMD Instinct MI300X data sheet",
                "AMD Instinct MI300X platform data sheet; its network is the builder's choice",
                f"{_NCCL}, assumed of RCCL",
            ),
        ),
    )
})  # fmt: skip


def device_named(device: str | Device) -> Device:
    """The description of a device.

    Raises:
        ValueError: if there is none of this name.
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ValueError(
            f"device is {device!r}; pass one of {', '.join(sorted(DEVICES))}, or a "
            "fullshard.preflight.Device that you describe"
        )
    return DEVICES[device]
