"""Time that a CUDA device spends in copies, by torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["DEFINITION", "copy_kernels_ms"]

DEFINITION = (
    "copy kernels: time of the device's kernels and transfers in a step whose names say that they"
    " copy, concatenate, split or pad; the model's own are among them, so compare with none's"
)

_COPIES = re.compile(r"memcpy|copy|cat(?!egor)|chunk|split_with_sizes|constant_pad", re.IGNORECASE)


def copy_kernels_ms(step: Callable[[], object]) -> float:
    """Run `step` once; milliseconds of its copies on the device."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    on_device = (
        event
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    total = sum(event.time_range.elapsed_us() for event in on_device if _COPIES.search(event.name))
    return float(total) / 1e3
