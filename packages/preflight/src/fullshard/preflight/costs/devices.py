"""Devices and the links between them, as frozen descriptions with their sources.

Owns the figures that data sheets give, the latencies that NCCL assumes, and the efficiencies that
are assumed of kernels and links; nothing here was measured. Each description names where its
figures were found, and which were not. Refuses to time anything: ``kernels`` and ``collectives`` do
that from a description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from fullshard.preflight.costs.hosts import PCIE_4, PCIE_5, Host

__all__ = ["DEVICES", "Device", "Efficiency", "Link", "device_named"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects devices, of one host or of several.

    Attributes:
        name: what it is called.
        bandwidth: bytes per second that one device sends at the same time as it receives as many.
        latency: seconds of one step of a ring by large messages (NCCL's protocol Simple).
        short_latency: the same by short messages, which use less of the bandwidth (NCCL's LL).
        tree_latency: seconds of one step of a tree by large messages.
        short_tree_latency: the same by short messages.
    """

    name: str
    bandwidth: float
    latency: float
    short_latency: float
    tree_latency: float
    short_tree_latency: float


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Parts of a device's peaks that are assumed, not measured, to be reached.

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

    def __str__(self) -> str:
        """What a report says beside each time."""
        return (
            f"assumed, not measured: matrix products reach {self.matmul:.0%} of the device's peak, "
            f"attention {self.attention:.0%}, memory {self.memory:.0%}, links {self.link:.0%}"
        )


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, the host that drives it, and what it is connected by.

    Attributes:
        name: as ``device_named`` finds it.
        flops: FLOP/s of matrix products by dtype, dense; float32 without TF32, as torch computes.
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
        host: what offload copies to and from.
        efficiency: what is assumed to be reached.
        sources: where the figures are from, and which of them were not checked.
        measured: what was measured, and how; empty of a device that is described.
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
    host: Host = PCIE_5
    efficiency: Efficiency = field(default_factory=Efficiency)
    sources: tuple[str, ...] = ()
    measured: str = ""

    @property
    def basis(self) -> str:
        """What a report says of where its times are from."""
        return self.measured or str(self.efficiency)

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s in a dtype; of one that is not described, those of float32."""
        return self.flops.get(dtype, self.flops[torch.float32])


def _flops(half: float, single: float, double: float) -> Mapping[torch.dtype, float]:
    return {torch.bfloat16: half, torch.float16: half, torch.float32: single, torch.float64: double}


def _link(name: str, bandwidth: float) -> Link:
    """A link inside a host, with NCCL's latencies for NVLink."""
    return Link(
        name=name,
        bandwidth=bandwidth,
        latency=3.4e-6,
        short_latency=0.6e-6,
        tree_latency=28e-6,
        short_tree_latency=0.6e-6,
    )


def _network(gigabits: int) -> Link:
    """A network card for each device, with NCCL's latencies for networks."""
    return Link(
        name=f"{gigabits} Gbit/s network",
        bandwidth=gigabits * 1e9 / 8,
        latency=14e-6,
        short_latency=2.7e-6,
        tree_latency=28e-6,
        short_tree_latency=5e-6,
    )


_NCCL = (
    "latencies: NVIDIA/nccl, src/graph/tuning.cc at b6475625 (hwLat, and baseLat of a ring by large"
    " messages), without the network's own"
)
_HOPPER = (
    "FLOP/s: NVIDIA's H100 white paper, as glennklockwood.com/garden/processors/h100 gives it;"
    " dense bfloat16 and float32 also in stas00/ml-engineering, compute/accelerator/README.md"
)
_HOPPER_HOST = (
    "network: eight ConnectX-7 of 400 Gbit/s to eight GPUs, docs.nvidia.com/dgx-basepod, core"
    " components"
)
_UNCHECKED = (
    "launch, shortest: round figures, assumed; host: 16 lanes of PCIe each way, and an eighth of"
    " the 16 channels of two processors, DDR4-3200 (PCIe 4) or DDR5-4800 (PCIe 5): computed"
)
_FLASH = "flash attention"

DEVICES: Mapping[str, Device] = MappingProxyType({
    each.name: each
    for each in (
        Device(
            name="a100",
            flops=_flops(312e12, 19.5e12, 19.5e12),
            memory=80e9,
            bandwidth=2.039e12,
            per_host=8,
            inside=_link("NVLink 3", 300e9),
            between=_network(200),
            attention=_FLASH,
            host=PCIE_4,
            sources=(
                "FLOP/s, memory, NVLink: NVIDIA's A100 80GB SXM data sheet (1758950 r4), as"
                " glennklockwood.com/garden/processors/A100 gives it",
                "network: not checked, from memory of the DGX A100 data sheet",
                _NCCL,
                _UNCHECKED,
            ),
        ),
        Device(
            name="h100",
            flops=_flops(989.4e12, 66.9e12, 66.9e12),
            memory=80e9,
            bandwidth=3.35e12,
            per_host=8,
            inside=_link("NVLink 4", 450e9),
            between=_network(400),
            attention=_FLASH,
            sources=(
                _HOPPER,
                "memory: stas00/ml-engineering, compute/accelerator/README.md",
                "NVLink: 900 GB/s both ways together, nvidia.com/technologies/hopper-architecture",
                _HOPPER_HOST,
                _NCCL,
                _UNCHECKED,
            ),
        ),
        Device(
            name="h200",
            flops=_flops(989.4e12, 66.9e12, 66.9e12),
            memory=141e9,
            bandwidth=4.8e12,
            per_host=8,
            inside=_link("NVLink 4", 450e9),
            between=_network(400),
            attention=_FLASH,
            sources=(
                _HOPPER,
                "memory: stas00/ml-engineering, compute/accelerator/README.md",
                "memory, NVLink, network: NVIDIA's system H200-SXM-141GBx8 in MLPerf Inference 4.1",
                _NCCL,
                _UNCHECKED,
            ),
        ),
        Device(
            name="b200",
            flops=_flops(2250e12, 75e12, 37e12),
            memory=180e9,
            bandwidth=7.67e12,
            per_host=8,
            inside=_link("NVLink 5", 900e9),
            between=_network(400),
            attention=_FLASH,
            sources=(
                "FLOP/s, NVLink: an eighth of NVIDIA's HGX B200 table, of sparse FLOP/s a"
                " sixteenth, as fibermall.com/blog/nvidia-hgx-b300-overview.htm gives it",
                "memory, network: docs.nvidia.com/dgx/dgxb200-user-guide",
                "its bandwidth: from the bus and clock that the driver reports, pytorch/ao #4002;"
                " the data sheet says 8 TB/s",
                _NCCL,
                _UNCHECKED,
            ),
        ),
        Device(
            name="mi300x",
            flops=_flops(1307.4e12, 163.4e12, 163.4e12),
            memory=192e9,
            bandwidth=5.3e12,
            per_host=8,
            inside=_link("Infinity Fabric", 448e9),
            between=_network(400),
            attention=_FLASH,
            efficiency=Efficiency(matmul=0.5),
            sources=(
                "FLOP/s, memory: stas00/ml-engineering, compute/accelerator/README.md; float64 not"
                " checked, from memory of the data sheet",
                "Infinity Fabric: seven links of 64 GB/s each way,"
                " emergentmind.com/topics/amd-mi300x-gpu; an axis over fewer devices of a host has"
                " fewer of them, which is not considered",
                "efficiency of matrix products: stas00/ml-engineering measured 51 and 60 % at best,"
                " of an A100 87, of an H100 80; 50 is assumed here, of the others 70",
                "network: the builder's choice; 400 Gbit/s for each device is assumed",
                f"{_NCCL}; assumed of RCCL",
                _UNCHECKED,
            ),
        ),
    )
})  # fmt: skip
"""The devices that `plan` knows by name: `plan(device="h100")`."""


def device_named(device: str | Device) -> Device:
    """The description of a device.

    Raises:
        ValueError: if there is none of this name.
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ValueError(
            f'device is {device!r}; pass one of {", ".join(sorted(DEVICES))}, "here" for this '
            'machine, "cpu" for memory alone, or a fullshard.preflight.Device that you describe'
        )
    return DEVICES[device]
