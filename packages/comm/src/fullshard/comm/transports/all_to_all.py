"""Reduce-scatters by an all-to-all: each rank gets the others' parts, and adds them itself.

Owns: the all-to-all, a transport that reduces by it, and the memory in which parts arrive. Gloo's
own reduce-scatter adds on the way, in steps that wait for each other; an all-to-all sends every
byte once, at once, and what has arrived is added in rank order, bf16 and fp16 in fp32. Refuses:
choosing itself (see ``fullshard.samehost``).

[Note: order of messages] Gloo sends a message once its receiver has asked for it, and a rank asks
on the connection that carries what it sends itself. Gloo's own all-to-all, and its all-gather of
two ranks, send first: then the rank that is asked sooner fills the connection. Its own request
waits behind all its data, and only one direction is in use at a time. In ``exchange`` every rank
asks for its own before it sends any. For 6.3 MB each way over 1 Gbit/s gloo's all-gather took 58 to
80 ms, its all-to-all 76 to 104, this order 53 to 57, and the wire alone takes 50 (torch 2.13).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import BlockPool
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.runtime.works import SeveralWorks, awaited
from fullshard.comm.transports.rank_order import check_reduction, reduce_in_rank_order
from fullshard.comm.transports.transport import ProcessGroupTransport

__all__ = ["AllToAllTransport", "all_to_all", "exchange", "is_served"]

_TAG = 1 << 30  # gloo hands on messages of one tag in order; users count theirs from 0
_CPU = torch.device("cpu")

_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, BlockPool] = weakref.WeakKeyDictionary()


def is_served(device: torch.device, process_group: dist.ProcessGroup) -> bool:
    """Whether ranks can exchange tensors on ``device`` so: gloo's messages are of host memory."""
    return not traits_of(device).queued and compat.backend_names(process_group, _CPU) == ("gloo",)


def exchange(
    sent: Sequence[torch.Tensor],
    arriving: Sequence[torch.Tensor],
    process_group: dist.ProcessGroup,
    async_op: bool,
) -> dist.Work | None:
    """In ``arriving[r]`` what rank ``r`` has in its ``sent`` for this rank.

    ``arriving`` and ``sent`` hold a contiguous tensor per rank, with as many bytes as that rank has
    for this one. This rank's own is copied, unless it is the same memory. A collective call: all
    ranks call it in the same order.
    """
    rank, size = process_group.rank(), process_group.size()
    if arriving[rank].data_ptr() != sent[rank].data_ptr():
        arriving[rank].copy_(sent[rank])
    after = [(rank + step) % size for step in range(1, size)]  # so not all send to the same one
    asked = [(peer, arriving[peer].view(torch.uint8)) for peer in reversed(after)]
    given = [(peer, sent[peer].view(torch.uint8)) for peer in after]
    works = [process_group.recv([each], peer, _TAG) for peer, each in asked if each.numel()]
    works += [process_group.send([each], peer, _TAG) for peer, each in given if each.numel()]
    return awaited(SeveralWorks(works), async_op)


def all_to_all(
    output: torch.Tensor, input: torch.Tensor, process_group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """Part ``r`` of each rank's ``input`` in rank ``r``'s ``output``; all parts are equal."""
    if is_served(input.device, process_group):
        size = process_group.size()
        return exchange(input.chunk(size), output.chunk(size), process_group, async_op)
    work = dist.all_to_all_single(
        output.view(torch.uint8),  # as bytes: backends know fewer dtypes
        input.view(torch.uint8),
        group=process_group,
        async_op=async_op,
    )
    return cast("dist.Work | None", work)


class _Parts:
    """Memory for the parts of one reduction, in a block of a pool.

    The host's memory is kept for the process group's next reduction. A device has an allocator that
    keeps it.
    """

    def __init__(self, input: torch.Tensor, process_group: dist.ProcessGroup) -> None:
        """Allocate as much as ``input``."""
        kept, nbytes = not traits_of(input.device).queued, input.nbytes
        self.pool = _pools.setdefault(process_group, BlockPool()) if kept else BlockPool()
        new = functools.partial(torch.empty, dtype=torch.uint8, device=input.device)
        self.block = self.pool.take_block(nbytes, new)
        self.data = self.block.narrow(0, 0, nbytes).view(input.dtype)


def _reducing(
    work: dist.Work | None, arrived: _Parts, output: torch.Tensor, op: ReduceOp
) -> SeveralWorks:
    """The handle of an all-to-all; its first ``wait()`` also adds the parts that arrived."""

    def add() -> None:
        if output.numel():
            parts = arrived.data.view(-1, output.numel()).unbind()
            with torch.inference_mode(output.is_inference()):  # what it was made in
                reduce_in_rank_order(parts, output.view(-1), op)
        arrived.pool.put_back(arrived.block)

    return SeveralWorks(() if work is None else (work,), add)


@dataclass(frozen=True, slots=True)
class AllToAllTransport(ProcessGroupTransport):
    """The process group's gathers; reductions by an all-to-all and additions in rank order.

    For process groups over a network whose own reduce-scatter is slow, as gloo's is; between two
    ranks its gathers are exchanged, too. The sum does not depend on timing. A
    reduction needs memory for its input once more while it travels; on the CPU it is kept for the
    next one, as much as was ever in use at once.
    """

    @staticmethod
    def all_gather(
        output: torch.Tensor, input: torch.Tensor, process_group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        """Every rank's ``input`` (``[n]``) in ``output`` (``[world * n]``), in rank order."""
        if process_group.size() != 2 or not is_served(input.device, process_group):
            return compat.gather_into(output, input, process_group, async_op)
        return exchange((input, input), output.chunk(2), process_group, async_op)

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
            ValueError: if ``op`` is not defined for the dtype, or the sizes do not fit.
        """
        check_reduction(op, input.dtype)
        if input.numel() != process_group.size() * output.numel():
            raise ValueError(
                f"got an input of {input.numel()} elements and an output of {output.numel()} for "
                f"{process_group.size()} ranks; the input must be the output times the ranks"
            )
        arrived = _Parts(input, process_group)
        work = all_to_all(arrived.data, input, process_group, async_op)
        return awaited(_reducing(work, arrived, output, op), async_op)
