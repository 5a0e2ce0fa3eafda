"""Adds the asynchronous device, and its process group, to torch."""

from __future__ import annotations

import atexit
import functools
from typing import Any

import torch.distributed as dist

from support.device.building import extension, missing_tools

NAME = "asynccpu"  # torch asks for letters only
BACKEND = "asyncgloo"


def why_not() -> str:
    """Return why the device cannot be had here, or an empty string."""
    return missing_tools()


@functools.cache
def load() -> Any:
    """Add the device to torch, once in a process, and return its device module.

    It cannot be removed again.
    """
    import torch._meta_registrations  # the sizes of results: C++ has them of some operators only

    built = extension()
    from support.device import module

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[NAME])
    atexit.register(built.stop)
    return module


def _create(options: Any, backend_options: Any) -> dist.Backend:
    """Return the process group's part of one rank, from what ``init_process_group`` knows."""
    rank, size = options.group_rank, options.group_size

    def gloo(number: int) -> Any:
        store = dist.PrefixStore(f"stream {number}", options.store)
        return dist.ProcessGroupGloo(store, rank, size, options.timeout)

    return extension().Collectives(rank, size, gloo)
