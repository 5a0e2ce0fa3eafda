"""Devices, their hosts, and the links between them, as frozen descriptions with their sources.

Owns the figures that data sheets give, the latencies that NCCL assumes, and the efficiencies of
kernels and links: assumed, or fitted to published training runs. A description names the sources of
its figures, and the figures without a source. ``kernels`` and ``collectives`` time things on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch

__all__ = [
    "DEVICES",
    "Device",
    "Efficiency",
    "Host",
    "Link",
    "device_named",
    "host_seconds",
    "transfer_seconds",
]


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


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices, of one host or of several.

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
    """Parts of a device's peaks that a training step reaches.

    Attributes:
        matmul: of FLOP/s in matrix products.
        attention: of FLOP/s in fused attention.
        memory: of the memory's bandwidth in all other operations.
        link: of a link's bandwidth.
        basis: where these come from, in a few words.
    """

    matmul: float = 0.7
    attention: float = 0.45
    memory: float = 0.8
    link: float = 0.8
    basis: str = "assumed, not measured"

    def __str__(self) -> str:
        """Return the text that a report prints with the times."""
        return (
            f"{self.basis}: matrix products reach {self.matmul:.0%} of the device's peak, "
            f"attention {self.attention:.0%}, memory {self.memory:.0%}, links {self.link:.0%}"
        )


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, the host that drives it, and the links that connect it.

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
        efficiency: what a training step reaches of these figures.
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
        """Return the source of the times, for a report."""
        return self.measured or str(self.efficiency)

    def peak(self, dtype: torch.dtype) -> float:
        """FLOP/s in a dtype; the float32 figure for a dtype that is not described."""
        return self.flops.get(dtype, self.flops[torch.float32])


class _Sheet(NamedTuple):
    """A line of the table: figures of a data sheet, in its own units."""

    tflops: tuple[float, float, float]  # 16 bits, float32, float64
    memory: float  # GB
    bandwidth: float  # TB/s
    inside: tuple[str, float]  # the link inside a host, GB/s
    network: int  # Gbit/s
    sources: tuple[str, ...]
    host: Host = PCIE_5
    efficiency: Efficiency = Efficiency()

    def device(self, name: str) -> Device:
        """The description; latencies are NCCL's for NVLink and for networks."""
        half, single, double = (1e12 * each for each in self.tflops)
        return Device(
            name=name,
            flops={
                torch.bfloat16: half, torch.float16: half,
                torch.float32: single, torch.float64: double,
            },
            memory=self.memory * 1e9,
            bandwidth=self.bandwidth * 1e12,
            per_host=8,
            inside=Link(
                name=self.inside[0], bandwidth=self.inside[1] * 1e9, latency=3.4e-6,
                short_latency=0.6e-6, tree_latency=28e-6, short_tree_latency=0.6e-6,
            ),
            between=Link(
                name=f"{self.network} Gbit/s network", bandwidth=self.network * 1e9 / 8,
                latency=14e-6, short_latency=2.7e-6, tree_latency=28e-6, short_tree_latency=5e-6,
            ),
            attention="flash attention",
            host=self.host,
            efficiency=self.efficiency,
            sources=(*self.sources, _NCCL, _UNCHECKED),
        )  # fmt: skip


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
_FITTED = Efficiency(matmul=0.47, attention=0.35, basis="fitted to published training runs on H100")
# one H200, measured, reached more than this (docs/how-to/plan.md), many cards reach less
_ONE_CHIP = Efficiency(matmul=0.5, attention=0.35, basis="between H100 runs and one measured H200")
_RUNS = (
    "efficiency of matrix products: fitted to tokens/s of eager training, Llama 3.1 8B on 8 and 128"
    " GPUs (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md) and MPT 7B, 13B and"
    " 30B on 8 and 64 (mosaicml/llm-foundry, scripts/train/benchmarking/README.md, H100 80GB BF16)",
    "efficiency of attention: FlashAttention-2 reaches 35 % of an H100 (Shah et al.,"
    " FlashAttention-3, arXiv:2407.08608)",
)
_UNCHECKED = (
    "launch, shortest: round figures, assumed; host: 16 lanes of PCIe each way, and an eighth of"
    " the 16 channels of two processors, DDR4-3200 (PCIe 4) or DDR5-4800 (PCIe 5): computed"
)

_SHEETS = {
    "a100": _Sheet(
        (312, 19.5, 19.5), 80, 2.039, ("NVLink 3", 300), 200, (
            "FLOP/s, memory, NVLink: NVIDIA's A100 80GB SXM data sheet (1758950 r4), as"
            " glennklockwood.com/garden/processors/A100 gives it",
            "network: not checked, from memory of the DGX A100 data sheet",
        ), host=PCIE_4,
    ),
    "h100": _Sheet(
        (989.4, 66.9, 66.9), 80, 3.35, ("NVLink 4", 450), 400, (
            _HOPPER,
            "memory: stas00/ml-engineering, compute/accelerator/README.md",
            "NVLink: 900 GB/s both ways together, nvidia.com/technologies/hopper-architecture",
            _HOPPER_HOST,
            *_RUNS,
        ), efficiency=_FITTED,
    ),
    "h200": _Sheet(
        (989.4, 66.9, 66.9), 141, 4.8, ("NVLink 4", 450), 400, (
            _HOPPER,
            "memory: stas00/ml-engineering, compute/accelerator/README.md",
            "memory, NVLink, network: NVIDIA's system H200-SXM-141GBx8 in MLPerf Inference 4.1",
            *_RUNS,
        ), efficiency=_ONE_CHIP,
    ),
    "b200": _Sheet(
        (2250, 75, 37), 180, 7.67, ("NVLink 5", 900), 400, (
            "FLOP/s, NVLink: an eighth of NVIDIA's HGX B200 table, of sparse FLOP/s a sixteenth,"
            " as fibermall.com/blog/nvidia-hgx-b300-overview.htm gives it",
            "memory, network: docs.nvidia.com/dgx/dgxb200-user-guide",
            "its bandwidth: from the bus and clock that the driver reports, pytorch/ao #4002; the"
            " data sheet says 8 TB/s",
        ),
    ),
    "mi300x": _Sheet(
        (1307.4, 163.4, 163.4), 192, 5.3, ("Infinity Fabric", 448), 400, (
            "FLOP/s, memory: stas00/ml-engineering, compute/accelerator/README.md; float64 not"
            " checked, from memory of the data sheet",
            "Infinity Fabric: seven links of 64 GB/s each way,"
            " emergentmind.com/topics/amd-mi300x-gpu; an axis over fewer devices of a host has"
            " fewer of them, which is not considered",
            "efficiency of matrix products: stas00/ml-engineering measured 51 and 60 % at best, of"
            " an A100 87, of an H100 80; 50 is assumed here",
            "network: the builder's choice; 400 Gbit/s for each device is assumed",
            "latencies: NCCL's are assumed of RCCL",
        ), efficiency=Efficiency(matmul=0.5),
    ),
}  # fmt: skip

DEVICES: Mapping[str, Device] = MappingProxyType(
    {name: sheet.device(name) for name, sheet in _SHEETS.items()}
)
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
