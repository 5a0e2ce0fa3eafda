"""Moves the bytes of collectives through memory that the CPU ranks of one host share.

Owns: a transport. Refuses: the protocol of a collective (see ``shared_group``), and
choosing itself (see ``same_host``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fullshard.comm import ReduceOp, SelfTransport, Transport
from fullshard.comm.spi import Contribution, Rows, Span, awaited, check_reduction, traits_of
from fullshard.samehost.collective import SharedCollective
from fullshard.samehost.group import SharedBuffer, shared_group
from fullshard.samehost.regions import (
    all_reduction_of,
    gather_of,
    launch_reduction,
    launch_whole_or_in_spans,
)
from fullshard.samehost.signals import MessageKind

__all__ = ["SharedMemoryTransport"]


@dataclass(frozen=True, slots=True)
class SharedMemoryTransport(Transport):
    """Shared memory, for CPU tensors and process groups whose ranks are processes of one host.

    Each rank writes what the others need once, and they read it from there: a gather moves no byte
    twice, and a reduction adds in rank order, bf16 and fp16 in fp32, so that its result does not
    depend on timing. Asynchronous collectives write at the call and read in ``wait()``; those of
    more than about 16 MiB are over when the call returns.

    The first collective of a process group sets up its memory, and so does a larger one than any
    before; it is freed with the process group. No memory stays allocated after the ranks end, for
    any reason. A rank that ends while others wait for it is named by a ``PeerLostError``.
    """

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """Every rank's ``input`` (``[n]``) in ``output`` (``[world * n]``), in rank order.

        Raises:
            ValueError: if the tensors are not contiguous CPU tensors of these sizes.
            SharedMemoryError: on all ranks, if they are not on one host or memory is short.
            PeerLostError: if a rank has ended, or does not come in the process group's timeout.
        """
        world_size = process_group.size()
        _check_tensors(output, input, output.numel(), world_size * input.numel())
        if world_size == 1:
            return SelfTransport().all_gather(output, input, process_group, async_op)
        if input.numel() == 0:
            return None
        group = shared_group(process_group)
        unit, make = world_size * input.element_size(), partial(gather_of, group, output, input)
        return awaited(launch_whole_or_in_spans(group, input.numel(), unit, make), async_op)

    def open_shared_buffer(self, process_group: dist.ProcessGroup, nbytes: int) -> SharedBuffer:
        """New memory of ``nbytes`` that every rank maps, for gathers in place. A collective call.

        Raises:
            SharedMemoryError: on all ranks, if they are not on one host or memory is short.
            PeerLostError: as ``all_gather``.
        """
        return shared_group(process_group).open_shared_buffer(nbytes)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool,
    ) -> dist.Work | None:
        """In ``output`` (``[n]``), this rank's part of the reduced ``input`` (``[world * n]``).

        Raises:
            ValueError: if the tensors are not contiguous CPU tensors of these sizes, or ``op`` is
                not defined for their dtype.
            SharedMemoryError: as ``all_gather``.
            PeerLostError: as ``all_gather``.
        """
        world_size = process_group.size()
        _check_tensors(output, input, input.numel(), world_size * output.numel())
        check_reduction(op, input.dtype)
        if world_size == 1:
            return SelfTransport().reduce_scatter(output, input, process_group, op, async_op)
        if input.numel() == 0:
            return None
        group = shared_group(process_group)
        rows = (Rows(0, 0, input.detach().view(world_size, -1)),)
        given = Span(rows=rows, dtype=input.dtype, rank=group.rank, numel=output.numel())
        return awaited(launch_reduction(group, lambda: output, given, op), async_op)

    def parts_reducer(
        self, process_group: dist.ProcessGroup, device: torch.device, op: ReduceOp
    ) -> SharedMemoryTransport | None:
        """This transport, except for one rank alone."""
        return self if process_group.size() > 1 else None

    def reduce_parts(
        self,
        allocate: Callable[[], torch.Tensor],
        contribution: Contribution,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
    ) -> dist.Work:
        """In flight: this rank's slice of the result, ``[slice_numel]``, in what ``allocate`` gave.

        A rank writes the parts for other ranks directly from its gradients to where those ranks
        read.

        Raises:
            ValueError: as ``reduce_scatter``.
            SharedMemoryError: as ``all_gather``.
            PeerLostError: as ``all_gather``.
        """
        check_reduction(op, contribution.dtype)
        return launch_reduction(shared_group(process_group), allocate, contribution, op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        process_group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """Every rank's ``tensor`` reduced, in place: equal on all ranks, to the last bit.

        Each rank writes its own once, reads all others', and adds in rank order. With ``n`` ranks,
        each rank reads ``n - 1`` tensors: for a few, as the replicas on one host are, that is fewer
        bytes and fewer waits than reducing parts and gathering them.

        Raises:
            ValueError: if the tensor is no contiguous CPU tensor, or ``op`` is not defined for its
                dtype.
            SharedMemoryError: as ``all_gather``.
            PeerLostError: as ``all_gather``.
        """
        _check_tensor("tensor", tensor)
        check_reduction(op, tensor.dtype)
        if process_group.size() == 1 or tensor.numel() == 0:
            return None
        group = shared_group(process_group)
        unit = group.world_size * tensor.element_size()
        make = partial(all_reduction_of, group, tensor.detach().view(-1), op)
        return awaited(launch_whole_or_in_spans(group, tensor.numel(), unit, make), async_op)

    def exchange(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        nbytes: int,
        write: Callable[[torch.Tensor], None],
        read: Callable[[torch.Tensor], None],
    ) -> dist.Work:
        """In flight: every rank writes its part of one region, and reads what others wrote there.

        For what no collective of equal parts can say, as an all-to-all of parts of any sizes.

        Args:
            process_group: of more than one rank.
            device: that of the values, whose memory the ranks can map.
            nbytes: of the region, more than 0: the same on all ranks.
            write: gets the region, uint8 ``[nbytes]``, at once; ranks write different parts of it.
            read: gets it when all have written, in ``wait()`` or before; it is gone afterwards.

        Raises:
            SharedMemoryError: as ``all_gather``.
            PeerLostError: as ``all_gather``.
        """
        collective = SharedCollective(
            kind=MessageKind.EXCHANGE,
            nbytes=nbytes,
            detail=0,
            region=nbytes,
            write=write,
            read=read,
        )
        return shared_group(process_group).launch(collective)


def _check_tensors(
    output: torch.Tensor, input: torch.Tensor, whole: int, world_times_part: int
) -> None:
    if whole != world_times_part or output.dtype is not input.dtype:
        raise ValueError(
            f"got an output of {output.numel()} {output.dtype} and an input of {input.numel()} "
            f"{input.dtype}; one must be the world size times the other, in one dtype."
        )
    _check_tensor("output", output)
    _check_tensor("input", input)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not (traits_of(tensor.device).shared_memory and tensor.is_contiguous()):
        raise ValueError(
            f"SharedMemoryTransport got an {name} on {tensor.device} with strides "
            f"{tensor.stride()}; it moves contiguous CPU tensors. Use ProcessGroupTransport()."
        )
