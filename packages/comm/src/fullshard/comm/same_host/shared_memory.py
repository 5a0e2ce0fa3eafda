"""Moves the bytes of collectives through memory that the CPU ranks of one host share.

Owns: a transport. Refuses: the protocol of a collective (see ``shared_group``), and
choosing itself (see ``same_host``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.same_host.shared_collective import SharedCollective
from fullshard.comm.same_host.shared_group import SharedBuffer, SharedGroup, shared_group
from fullshard.comm.same_host.shared_signals import MessageKind
from fullshard.comm.transports.contribution import Contribution
from fullshard.comm.transports.rank_order import check_reduction, reduce_in_rank_order
from fullshard.comm.transports.transport import SelfTransport

__all__ = ["SharedMemoryTransport"]


@dataclass(frozen=True, slots=True)
class SharedMemoryTransport:
    """Shared memory, for CPU tensors and process groups whose ranks are processes of one host.

    Each rank writes what the others need once, and they read it from there: a gather moves no byte
    twice, and a reduction adds in rank order, bf16 and fp16 in fp32, so that its result does not
    depend on timing. Asynchronous collectives write at the call and read in ``wait()``.

    The first collective of a process group sets up its memory, and so does a larger one than any
    before; it is freed with the process group. Nothing is left of it when ranks end, however they
    do. A rank that ends while others wait for it is named by a ``PeerLostError``.
    """

    @property
    def in_place(self) -> bool:
        """True: a gather's input may be this rank's slice of its output."""
        return True

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
        return _launched(group, _gather(group, output, input), async_op)

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
        name = check_reduction(op, input.dtype)
        if world_size == 1:
            return SelfTransport().reduce_scatter(output, input, process_group, op, async_op)
        if input.numel() == 0:
            return None
        group, given = shared_group(process_group), _Packed(input, output.numel())
        return _launched(group, _reduction(group, lambda: output, given, op, name), async_op)

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

        Each rank writes what the others need where they read it, from where its gradients lie.

        Raises:
            ValueError: as ``reduce_scatter``.
            SharedMemoryError: as ``all_gather``.
            PeerLostError: as ``all_gather``.
        """
        name = check_reduction(op, contribution.dtype)
        group = shared_group(process_group)
        return group.launch(_reduction(group, allocate, contribution, op, name))

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        process_group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """Every rank's ``tensor`` reduced, in place: equal on all ranks, to the last bit.

        Each rank writes its own once, reads all others', and adds in rank order. So ``n`` ranks
        read ``n - 1`` tensors each: for a few, as the replicas on one host are, that is fewer bytes
        and fewer waits than reducing parts and gathering them.

        Raises:
            ValueError: if the tensor is no contiguous CPU tensor, or ``op`` is not defined for its
                dtype.
            SharedMemoryError: as ``all_gather``.
            PeerLostError: as ``all_gather``.
        """
        _check_tensor("tensor", tensor)
        name = check_reduction(op, tensor.dtype)
        if process_group.size() == 1 or tensor.numel() == 0:
            return None
        group = shared_group(process_group)
        return _launched(group, _all_reduction(group, tensor, op, name), async_op)

    def exchange(
        self,
        process_group: dist.ProcessGroup,
        nbytes: int,
        write: Callable[[torch.Tensor], None],
        read: Callable[[torch.Tensor], None],
    ) -> dist.Work:
        """In flight: every rank writes its part of one region, and reads what others wrote there.

        For what no collective of equal parts can say, as an all-to-all of parts of any sizes.

        Args:
            process_group: of more than one rank.
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


def _launched(group: SharedGroup, collective: SharedCollective, async_op: bool) -> dist.Work | None:
    work = group.launch(collective)
    if async_op:
        return work
    work.wait()
    return None


def _gather(group: SharedGroup, output: torch.Tensor, input: torch.Tensor) -> SharedCollective:
    """A region of one part per rank."""
    rank, nbytes = group.rank, input.nbytes

    def write(region: torch.Tensor) -> None:
        region.narrow(0, rank * nbytes, nbytes).copy_(_bytes_of(input))

    def read(region: torch.Tensor) -> None:
        gathered, own = _bytes_of(output), rank * nbytes
        if output.data_ptr() + own != input.data_ptr():
            gathered.copy_(region)
            return
        for start, end in ((0, own), (own + nbytes, gathered.numel())):
            if start < end:
                gathered[start:end].copy_(region[start:end])

    return SharedCollective(
        kind=MessageKind.GATHER,
        nbytes=nbytes,
        detail=0,
        region=output.nbytes,
        write=write,
        read=read,
    )


class _Parts(Protocol):
    """What one rank gives to a reduction, such as a ``Contribution``."""

    @property
    def dtype(self) -> torch.dtype:
        """In which it is reduced."""
        raise NotImplementedError

    @property
    def numel(self) -> int:
        """How many numbers one rank's part is."""
        raise NotImplementedError

    def write(self, buffer: torch.Tensor, ranks: range) -> None:
        """Fill ``buffer``, ``[len(ranks) * n]``, with the parts for these ranks."""
        raise NotImplementedError

    def reduce(
        self, others: Sequence[torch.Tensor | None], output: torch.Tensor, op: ReduceOp
    ) -> None:
        """Reduce the others' parts, by rank, and its own, where None is, into ``output``."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Packed:
    """Parts that lie side by side in ``[world * n]``."""

    input: torch.Tensor
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.input.dtype

    def write(self, buffer: torch.Tensor, ranks: range) -> None:
        start = ranks.start * self.numel
        given = _bytes_of(self.input.view(-1).narrow(0, start, buffer.numel()))
        _bytes_of(buffer).copy_(given)

    def reduce(
        self, others: Sequence[torch.Tensor | None], output: torch.Tensor, op: ReduceOp
    ) -> None:
        mine = self.input.view(len(others), -1)
        parts = [mine[rank] if other is None else other for rank, other in enumerate(others)]
        reduce_in_rank_order(parts, output, op)


def _reduction(
    group: SharedGroup,
    allocate: Callable[[], torch.Tensor],
    given: _Parts,
    op: ReduceOp,
    name: str,
) -> SharedCollective:
    """A region in which each rank has one part for every other, in rank order.

    ``allocate`` gives memory for this rank's part of the result, once all ranks' parts are there.
    ``name``: of the operation; ranks must meet for one of the same name and dtype.
    """
    rank, others, dtype = group.rank, group.world_size - 1, given.dtype
    nbytes = given.numel * dtype.itemsize
    room = others * nbytes  # of one rank

    def write(region: torch.Tensor) -> None:
        mine = region.narrow(0, rank * room, room).view(dtype)
        before = rank * given.numel
        if before:
            given.write(mine.narrow(0, 0, before), range(rank))
        if rank < others:
            after = mine.narrow(0, before, mine.numel() - before)
            given.write(after, range(rank + 1, others + 1))

    def read(region: torch.Tensor) -> None:
        parts: list[torch.Tensor | None] = []
        for sender in range(others + 1):
            if sender == rank:
                parts.append(None)
                continue
            start = sender * room + (rank - (rank > sender)) * nbytes
            parts.append(region.narrow(0, start, nbytes).view(dtype))
        output = allocate()
        with torch.inference_mode(output.is_inference()):  # what it was made in
            given.reduce(parts, output.view(-1), op)

    return SharedCollective(
        kind=MessageKind.REDUCE,
        nbytes=nbytes,
        detail=zlib.crc32(f"{dtype} {name}".encode()),
        region=(others + 1) * room,
        write=write,
        read=read,
    )


def _all_reduction(
    group: SharedGroup, tensor: torch.Tensor, op: ReduceOp, name: str
) -> SharedCollective:
    """A region of one part per rank, as ``_gather``'s; each rank reduces all of them."""
    rank, nbytes, dtype = group.rank, tensor.nbytes, tensor.dtype
    flat = tensor.detach().view(-1)

    def write(region: torch.Tensor) -> None:
        region.narrow(0, rank * nbytes, nbytes).copy_(_bytes_of(flat))

    def read(region: torch.Tensor) -> None:
        parts = list(region.view(group.world_size, -1).view(dtype).unbind())
        parts[rank] = flat
        with torch.inference_mode(flat.is_inference()):
            reduce_in_rank_order(parts, flat, op)

    return SharedCollective(
        kind=MessageKind.ALL_REDUCE,
        nbytes=nbytes,
        detail=zlib.crc32(f"{dtype} {name}".encode()),
        region=group.world_size * nbytes,
        write=write,
        read=read,
    )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory; detached, it may be written in and out of inference mode."""
    return tensor.detach().view(-1).view(torch.uint8)
