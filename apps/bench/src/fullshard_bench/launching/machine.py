"""The machine and the versions that a result was measured with; no name of a host or a path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy
import torch

__all__ = ["OtherWork", "describe_machine", "describe_versions", "memory_bytes"]


def describe_machine() -> dict[str, Any]:
    """CPU, cores, memory, kernel and GPUs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": _line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cores,
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": gpus,
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, torch, numpy, CUDA and fullshard."""
    try:
        ours = importlib.metadata.version("fullshard-sharding")
    except importlib.metadata.PackageNotFoundError:
        ours = "checkout"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": str(torch.version.cuda or "none"),
        "fullshard": ours,
    }


class OtherWork:
    """How busy other processes have kept this machine since it was made."""

    def __init__(self) -> None:
        self._start, self._others = time.perf_counter(), _others_seconds()

    def share(self) -> float:
        """The part of all cores that others had; 0 where the system does not tell.

        This process and its children that have ended are not others.
        """
        seconds = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        return (_others_seconds() - self._others) / seconds


def _others_seconds() -> float:
    """Processor seconds of all processes but this and its children."""
    file = Path("/proc/stat")
    if not file.is_file():
        return 0.0
    ticks = [int(word) for word in file.read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def _line(path: str, key: str) -> str:
    """The value of the first line `key : value` in a file; "" if there is none."""
    file = Path(path)
    if file.is_file():
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def memory_bytes() -> int:
    """Bytes of main memory; 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
