"""Capabilities of devices: the one place that asks the device's module.

Code that needs to know about streams, shared memory or float64 asks this module, so that a new
device needs no change. Only the memory of the host is described by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["DeviceTraits", "can_pin", "simulated", "traits_of"]


@dataclass(frozen=True, kw_only=True)
class DeviceTraits:
    """The capabilities of a device.

    Attributes:
        queued: work is queued, and the host waits where it reads a result.
        streams: there are several queues, ordered by events; else one, which is always in order.
        shared_memory: the processes of one host can map its memory.
        pinned_memory: its memory can be page-locked, if an accelerator offers that.
        float64: it computes in double precision.
        list_kernels: one kernel works on many tensors; else each costs a launch.
        numbered: a process may have several, and tensors say on which they are.
    """

    queued: bool = True
    streams: bool = True
    shared_memory: bool = False
    pinned_memory: bool = False
    float64: bool = True
    list_kernels: bool = True
    numbered: bool = True


_TRAITS = {
    "cpu": DeviceTraits(
        queued=False,
        streams=False,
        shared_memory=True,
        pinned_memory=True,
        list_kernels=False,
        numbered=False,
    ),
    "meta": DeviceTraits(queued=False, streams=False, numbered=False),
}
_STREAMS = ("Stream", "current_stream", "stream")
"""The names in a device's module, by torch's convention, that make and use streams."""


def traits_of(device: torch.device) -> DeviceTraits:
    """Return what ``device`` can: of an accelerator, what its module has."""
    traits = _TRAITS.get(device.type)
    if traits is None:
        traits = _TRAITS[device.type] = _read(device.type)
    return traits


def _read(device_type: str) -> DeviceTraits:
    """Ask the module of an accelerator, and test what its module does not report."""
    module = torch.get_device_module(device_type)
    return DeviceTraits(
        streams=all(hasattr(module, name) for name in _STREAMS),
        float64=_has_float64(device_type),
    )


def _has_float64(device_type: str) -> bool:
    try:
        torch.zeros((), dtype=torch.float64, device=device_type)
    except TypeError:  # what torch raises for a dtype that a device does not have
        return False
    except (AssertionError, RuntimeError):  # no such device here, so nothing is computed on it
        return True
    return True


@contextmanager
def simulated(device_type: str, traits: DeviceTraits) -> Iterator[None]:
    """Inside the ``with`` block devices of this type are taken for one that can do ``traits``.

    Objects made inside the block keep the traits that they read there. A caller that sets
    ``streams`` makes sure that ``torch.get_device_module`` of this type creates streams.
    """
    before = _TRAITS.get(device_type)
    _TRAITS[device_type] = traits
    try:
        yield
    finally:
        del _TRAITS[device_type]
        if before is not None:
            _TRAITS[device_type] = before


_pins: dict[str, bool] = {}  # by accelerator


def can_pin(device: torch.device) -> bool:
    """Return whether memory of ``device`` can be page-locked, for copies to an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not traits_of(device).pinned_memory:
        return False
    if accelerator.type not in _pins:
        _pins[accelerator.type] = _tries_to_pin()
    return _pins[accelerator.type]


def _tries_to_pin() -> bool:
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:  # an accelerator without an allocator of such memory
        return False
