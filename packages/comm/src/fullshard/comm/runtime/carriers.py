"""Choose the device on which a process group moves data: its carrier.

Tensors of a device without a backend in the group are copied to the CPU, if the group has a backend
for the CPU. ``compat.served_types`` returns what a group has backends for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm.runtime.compat import served_types

__all__ = ["carrier_of", "host_carrier_of"]

_CPU = torch.device("cpu")


def carrier_of(process_group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device on which tensors of ``device`` travel between the ranks of a group.

    Args:
        process_group: the ranks.
        device: the device of the tensors.

    Returns:
        The CPU if the group has a backend for the CPU and none for ``device``; else ``device``.
    """
    served = served_types(process_group)
    return _CPU if "cpu" in served and device.type not in served else device


def host_carrier_of(process_group: dist.ProcessGroup, device: torch.device) -> torch.device | None:
    """Return the device on which a few numbers of the host travel between the ranks of a group.

    Args:
        process_group: the ranks.
        device: the device on which the ranks compute.

    Returns:
        The CPU if the group has a backend for it, so that no rank waits for its device. ``device``
        if only that has a backend, or if the group is written in Python. None in other cases.
    """
    served = served_types(process_group)
    if "cpu" in served:
        return _CPU
    return device if not served or device.type in served else None
