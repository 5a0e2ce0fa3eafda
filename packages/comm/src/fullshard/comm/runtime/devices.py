"""Says what a device can: the one place that knows device types.

Whoever has to know whether there are streams, shared memory or float64 asks here, so that a new
device, or a simulated one, is one entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["DeviceTraits", "can_pin", "traits_of"]


@dataclass(frozen=True, kw_only=True)
class DeviceTraits:
    """What a device can.

    Attributes:
        streams: work is queued on streams, and the host waits for it where it reads a result.
        shared_memory: the processes of one host can map its memory.
        pinned_memory: its memory can be page-locked.
        float64: it computes in double precision.
        list_kernels: one kernel works on many tensors; else each costs a launch.
    """

    streams: bool = True
    shared_memory: bool = False
    pinned_memory: bool = False
    float64: bool = True
    list_kernels: bool = True


_ACCELERATOR = DeviceTraits()
_TRAITS = {
    "cpu": DeviceTraits(streams=False, shared_memory=True, pinned_memory=True, list_kernels=False),
    "meta": DeviceTraits(streams=False),
    "mps": DeviceTraits(float64=False),
}


def traits_of(device: torch.device) -> DeviceTraits:
    """Returns what ``device`` can; an accelerator, if nothing else is known of it."""
    return _TRAITS.get(device.type, _ACCELERATOR)


def can_pin(device: torch.device) -> bool:
    """Tells whether memory of ``device`` can be page-locked, for copies to an accelerator."""
    return traits_of(device).pinned_memory and torch.accelerator.is_available()
