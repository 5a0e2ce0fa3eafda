"""A few numbers that the ranks of a process group reduce, such as a norm.

Owns: an in-place all-reduce, which uses the shared memory of the CPU ranks of one host if it exists
already, and the process group otherwise. Refuses: setting such memory up, which takes longer than
either; and gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullshard.comm import EventKind, ReduceOp, check_collective
from fullshard.comm.spi import (
    Mark,
    carrier_of,
    default_transport,
    emit,
    marked_wait,
    raise_located,
)

__all__ = ["all_reduce_numbers"]


def all_reduce_numbers(
    numbers: torch.Tensor,
    process_group: dist.ProcessGroup,
    op: ReduceOp = dist.ReduceOp.SUM,
    *,
    name: str = "",
) -> None:
    """Reduce ``numbers`` in place: equal on all ranks, to the last bit. A collective call.

    Between ranks that share memory (their gathers or reductions did, by default) every rank reads
    all others' numbers, and reduces them in rank order. Everywhere else it is the process group's
    all-reduce, on the CPU if the group has no backend for the device of ``numbers``.

    Args:
        numbers: a contiguous tensor, small, of one shape and dtype on all ranks.
        process_group: the ranks.
        op: the reduction.
        name: what they are, for events and debug mode.

    Raises:
        ValueError: if ``numbers`` is not contiguous.
        PeerLostError: if a rank of this host has ended, or a rank that shares memory is late.
        CollectiveMismatchError: in debug mode, if the ranks did not come to the same collective.
    """
    if not numbers.is_contiguous():
        raise ValueError(
            f"{name or 'numbers'}: strides {numbers.stride()} of shape {tuple(numbers.shape)} are "
            "not contiguous, so it cannot be reduced in place; pass numbers.contiguous()"
        )
    nbytes = numbers.nbytes
    check_collective(EventKind.ALL_REDUCE, name, process_group, nbytes=nbytes)
    emit(EventKind.ALL_REDUCE, name, rank=process_group.rank(), nbytes=nbytes, stream="current")
    with marked_wait(Mark.WAIT, f"sum of {name or 'numbers'}"):
        transport = default_transport(process_group)
        if numbers.numel() and transport.is_set_up(process_group, numbers.device):
            transport.all_reduce(numbers, op, process_group, False)
            return
        sent = numbers.to(carrier_of(process_group, numbers.device))
        try:
            dist.all_reduce(sent, op, process_group)
        except RuntimeError as error:
            raise_located(error, "all-reduce", name, process_group)
        if sent is not numbers:
            numbers.copy_(sent)
