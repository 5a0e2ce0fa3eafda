"""The part of the machine that this process may use, and the device on which it computes."""

from __future__ import annotations

import os

import torch

__all__ = ["usable_cores", "usable_device"]


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1


def usable_device() -> torch.device:
    """Return the current accelerator, or the CPU without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator
