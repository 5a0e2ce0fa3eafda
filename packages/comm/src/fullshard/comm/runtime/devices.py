"""Says what a device can: the one place that knows device types.

Whoever has to know whether there are streams, shared memory or float64 asks here, so that a new
device, or a simulated one, is one entry.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["DeviceTraits", "can_pin", "simulated", "traits_of"]


@dataclass(frozen=True, kw_only=True)
class DeviceTraits:
    """What a device can.

    Attributes:
        streams: work is queued on streams, and the host waits for it where it reads a result.
        shared_memory: the processes of one host can map its memory.
        pinned_memory: its memory can be page-locked.
        float64: it computes in double precision.
        list_kernels: one kernel works on many tensors; else each costs a launch.
        numbered: a process may have several, and tensors say on which they are.
    """

    streams: bool = True
    shared_memory: bool = False
    pinned_memory: bool = False
    float64: bool = True
    list_kernels: bool = True
    numbered: bool = True


_ACCELERATOR = DeviceTraits()
_TRAITS = {
    "cpu": DeviceTraits(
        streams=False, shared_memory=True, pinned_memory=True, list_kernels=False, numbered=False
    ),
    "meta": DeviceTraits(streams=False, numbered=False),
    "mps": DeviceTraits(float64=False),
}


def traits_of(device: torch.device) -> DeviceTraits:
    """Returns what ``device`` can; an accelerator, if nothing else is known of it."""
    return _TRAITS.get(device.type, _ACCELERATOR)


@contextmanager
def simulated(device_type: str, traits: DeviceTraits) -> Iterator[None]:
    """Inside the ``with`` block devices of this type are taken for one that can do ``traits``.

    What is made inside keeps what it was told. Whoever says that there are streams sees to it that
    ``torch.get_device_module`` of this type makes some.
    """
    before = _TRAITS.get(device_type, _ACCELERATOR)
    _TRAITS[device_type] = traits
    try:
        yield
    finally:
        _TRAITS[device_type] = before


def can_pin(device: torch.device) -> bool:
    """Tells whether memory of ``device`` can be page-locked, for copies to an accelerator."""
    return traits_of(device).pinned_memory and torch.accelerator.is_available()
