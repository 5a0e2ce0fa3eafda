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
    default_transport,
    host_carrier_of,
    host_values,
    raise_located,
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
    own = torch.tensor([number], dtype=torch.int64)
    with waiting("agreement"):
        numbers = _gathered(own, process_group, device, plug_in)
        return host_values(numbers, [number] * process_group.size())


def objects_of_ranks(
    value: _T, process_group: dist.ProcessGroup, device: torch.device, plug_in: AllGather | None
) -> list[_T]:
    """Gather an object of each rank, in rank order; arguments as in ``numbers_of_ranks``."""
    pickled = bytearray(pickle.dumps(value))
    longest = max(numbers_of_ranks(len(pickled), process_group, device, plug_in))
    own = torch.frombuffer(pickled.ljust(longest, b"\0"), dtype=torch.uint8)
    with waiting("agreement"):
        rows = _gathered(own, process_group, device, plug_in).cpu().split(longest)
    return [pickle.loads(row.numpy().tobytes()) for row in rows]


def _gathered(
    own: torch.Tensor,
    process_group: dist.ProcessGroup,
    device: torch.device,
    plug_in: AllGather | None,
) -> torch.Tensor:
    """Gather the tensor of each rank (``[n]``) into one tensor (``[world * n]``)."""
    carrier = host_carrier_of(process_group, device)
    own = own.to(carrier or device)
    world_size = process_group.size()
    if carrier is None and plug_in is not None:
        sent = own.view(torch.uint8)
        spec = TensorSpec(shape=(sent.numel() * world_size,), dtype=sent.dtype)
        return all_gather_tensors([sent], [spec], process_group, comm=plug_in)[0].view(own.dtype)
    # filled with our own, so that a process group that moves nothing finds agreement
    gathered = own.repeat(world_size)
    transport = default_transport(process_group)
    if not transport.is_set_up(process_group, own.device):
        transport = ProcessGroupTransport()
    try:
        transport.all_gather(gathered, own, process_group, False)
    except RuntimeError as error:
        raise_located(error, "comparison", "settings", process_group)
    return gathered
