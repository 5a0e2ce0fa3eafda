"""Exchange small values between ranks, over what their process group serves.

``numbers_of_ranks`` and ``objects_of_ranks`` use the CPU if the group has a backend for it, else
the device on which ranks compute, else the collective that gathers parameters.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from fullshard.comm import (
    AllGather,
    ProcessGroupTransport,
    TensorSpec,
    all_gather_tensors,
    waiting,
)
from fullshard.comm.spi import (
    AutomaticTransport,
    host_carrier_of,
    host_values,
    raise_located,
    shares_memory,
)

__all__ = ["numbers_of_ranks", "objects_of_ranks"]

_T = TypeVar("_T")


def numbers_of_ranks(
    number: int, process_group: dist.ProcessGroup, device: torch.device, plug_in: AllGather | None
) -> Sequence[int]:
    """Gather a 64-bit number of each rank, in rank order.

    Args:
        number: this rank's number.
        process_group: the ranks.
        device: the device on which the ranks compute.
        plug_in: the collective to use if the group serves neither the CPU nor ``device``.
    """
    with waiting("agreement"):
        return _numbers_of_ranks(number, process_group, device, plug_in)


def _numbers_of_ranks(
    number: int, process_group: dist.ProcessGroup, device: torch.device, plug_in: AllGather | None
) -> Sequence[int]:
    world_size = process_group.size()
    alike = [number] * world_size
    carrier = host_carrier_of(process_group, device)
    own = torch.tensor([number], dtype=torch.int64, device=carrier or device)
    if carrier is None and plug_in is not None:
        gathered = _gathered(own.view(torch.uint8), process_group, plug_in)
        return host_values(gathered.view(torch.int64), alike)
    # filled with our own, so that a process group that moves nothing finds agreement
    numbers = own.repeat(world_size)
    shared = shares_memory(process_group, own.device)  # sockets take ten times as long
    transport = AutomaticTransport() if shared else ProcessGroupTransport()
    try:
        transport.all_gather(numbers, own, process_group, False)
    except RuntimeError as error:
        raise_located(error, "comparison", "settings", process_group)
    return host_values(numbers, alike)


def objects_of_ranks(
    value: _T, process_group: dist.ProcessGroup, device: torch.device, plug_in: AllGather | None
) -> list[_T]:
    """Gather an object of each rank, in rank order; arguments as in ``numbers_of_ranks``."""
    if host_carrier_of(process_group, device) is not None or plug_in is None:
        everyone = [value] * process_group.size()
        try:
            with waiting("agreement"):
                dist.all_gather_object(everyone, value, group=process_group)
        except RuntimeError as error:
            raise_located(error, "comparison", "settings", process_group)
        return everyone
    text = bytearray(pickle.dumps(value))
    sizes = numbers_of_ranks(len(text), process_group, device, plug_in)
    longest = max(sizes)
    own = torch.frombuffer(text.ljust(longest, b"\0"), dtype=torch.uint8).to(device)
    rows = _gathered(own, process_group, plug_in).cpu().split(longest)
    return [pickle.loads(row.numpy().tobytes()) for row in rows]


def _gathered(
    own: torch.Tensor, process_group: dist.ProcessGroup, plug_in: AllGather
) -> torch.Tensor:
    """Gather the bytes of each rank (``[n]``) by a plug-in, into one tensor (``[world * n]``)."""
    spec = TensorSpec(shape=(own.numel() * process_group.size(),), dtype=own.dtype)
    return all_gather_tensors([own], [spec], process_group, comm=plug_in)[0]
