"""Memory of a rank and speed of the model: the columns in addition to loss and learning rate.

Owns which number is taken as memory on which device, and model FLOPs utilisation. Refuses to
record: the trainer does.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn

from fullshard_train.ranks.distributed import World, over_ranks
from fullshard_train.settings.config import Config
from fullshard_train.task import Task
from fullshard_train.training.sharded import mixed_precision

if TYPE_CHECKING:
    from fullshard.preflight import Device

__all__ = ["CountsFlops", "Measures", "Memory", "Utilisation", "described", "utilisation_of"]

_MIB = 2**20
_STATUS = Path("/proc/self/status")


@runtime_checkable
class CountsFlops(Protocol):
    """A task for whose models there is a published formula of their FLOPs."""

    def flops_per_item(self, model: nn.Module) -> float:
        """FLOPs that one update does for one predicted item, forward and backward."""
        ...


class Memory:
    """The peak of this rank's memory: on CUDA, of the memory of the caching allocator.

    On the CPU it is the peak of the process's resident set since it began, interpreter and
    libraries included: the CPU's allocator does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def is_of(self) -> str:
        """Which memory that is, in words."""
        if self._device.type == "cuda":
            return "CUDA's caching allocator, peak since the line before"
        return "resident set of the process, peak since its start"

    def peak(self) -> int:
        """Bytes; on CUDA since the last call."""
        if self._device.type != "cuda":
            return _resident_peak()
        nbytes = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return nbytes


def _resident_peak() -> int:
    if _STATUS.exists():  # ru_maxrss also counts what the process was forked from
        lines = _STATUS.read_text().splitlines()
        (kib,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
        return int(kib) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """Model FLOPs utilisation: FLOPs of the model, and of its devices.

    Work that a run adds, such as recomputing activations, does not count as needed (Chowdhery et
    al. 2022, PaLM, https://arxiv.org/abs/2204.02311, appendix B).

    Attributes:
        flops_per_item: that one update does for one item, forward and backward.
        peak: FLOP/s of all devices.
    """

    flops_per_item: float
    peak: float

    def of(self, items_per_second: float) -> float:
        """The part of the peak that so many items take, from 0 to 1."""
        return items_per_second * self.flops_per_item / self.peak


def utilisation_of(
    task: Task, model: nn.Module, config: Config, *, world: World, device: torch.device
) -> Utilisation | str:
    """The utilisation of a run, or why it is unknown."""
    if not isinstance(task, CountsFlops):
        return f"the task {config.run.task} does not count the FLOPs of its models"
    peak = config.parallel.peak_flops
    if not peak:
        found = described(device)
        if found is None:
            return (
                f"the peak of this device ({_called(device)}) is not known;"
                " give --set parallel.peak_flops=FLOP/S"
            )
        policy = mixed_precision(config.parallel, device)
        peak = found.peak(policy.param_dtype or torch.float32)
    return Utilisation(flops_per_item=task.flops_per_item(model), peak=peak * world.size)


def described(device: torch.device) -> Device | None:
    """The description of preflight's that a GPU's name points to, if there is one."""
    if device.type != "cuda":
        return None
    # Imported here: it takes a while, and only this needs it.
    from fullshard.preflight import DEVICES

    name = _called(device).lower()
    return next((found for known, found in DEVICES.items() if known in name), None)


def _called(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass(slots=True, kw_only=True)
class Measures:
    """The columns of memory, speed and utilisation; every rank has one.

    Attributes:
        memory: of this rank.
        utilisation: of all ranks, or why it is unknown.
        peaks: the highest bytes of each rank so far; empty before the first line.
    """

    memory: Memory
    utilisation: Utilisation | str
    peaks: Sequence[int] = field(default=())

    def columns(self, items_per_second: float) -> Mapping[str, float]:
        """The columns of a line; every rank calls this, for memory is the highest of all."""
        now = over_ranks(self.memory.peak())
        self.peaks = [max(pair) for pair in zip(self.peaks or now, now, strict=True)]
        columns = {
            "items_per_second": round(items_per_second, 1),
            "peak_memory_mib": round(max(now) / _MIB, 2),
        }
        if isinstance(self.utilisation, Utilisation):
            used = self.utilisation.of(items_per_second)
            columns["model_flops_utilisation"] = round(used, 6)
        return columns
