"""Reduce-scatters by an all-to-all: each rank gets the others' parts, and adds them itself.

Owns: the all-to-all, a transport that reduces by it, and the memory in which parts arrive. Gloo's
own reduce-scatter adds on the way, in steps that wait for each other; an all-to-all sends every
byte once, at once, and what has arrived is added in rank order, bf16 and fp16 in fp32. Refuses:
choosing itself (see ``same_host``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm.buffers.buffers import BlockPool, Buffer
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.runtime.works import SeveralWorks, awaited
from fullshard.comm.transports.pairwise import exchange, is_served
from fullshard.comm.transports.rank_order import check_reduction, reduce_in_rank_order
from fullshard.comm.transports.transport import NarrowLaunch, ProcessGroupTransport

__all__ = ["AllToAllTransport", "all_to_all"]

_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, BlockPool] = weakref.WeakKeyDictionary()


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    process_group: dist.ProcessGroup,
    async_op: bool,
    parts: Sequence[int] | None = None,
) -> dist.Work | None:
    """Part ``r`` of every rank's ``input`` in rank ``r``'s ``output``, in order.

    ``parts``: elements of each rank's part; None: equal ones.
    """
    if not is_served(input.device, process_group):
        return compat.all_to_all_into(output, input, process_group, async_op, parts)
    size = process_group.size()
    numels = [input.numel() // size] * size if parts is None else list(parts)
    return exchange(input.split_with_sizes(numels), output.chunk(size), process_group, async_op)


class _Parts:
    """Memory for the parts of one reduction, in a block of a pool.

    The host's memory is kept for the process group's next reduction. A device has an allocator that
    keeps it.
    """

    def __init__(self, numel: int, input: torch.Tensor, process_group: dist.ProcessGroup) -> None:
        """Allocate ``numel`` elements of the dtype of ``input``."""
        kept, nbytes = not traits_of(input.device).queued, numel * input.itemsize
        self.pool = _pools.setdefault(process_group, BlockPool()) if kept else BlockPool()
        new = functools.partial(torch.empty, dtype=torch.uint8, device=input.device)
        self.block = self.pool.take_block(nbytes, new)
        self.data = self.block.narrow(0, 0, nbytes).view(input.dtype)


def _reducing(
    work: dist.Work | None, memory: Sequence[_Parts], output: torch.Tensor, op: ReduceOp
) -> SeveralWorks:
    """The handle of an all-to-all; its first ``wait()`` also adds what came to ``memory[0]``."""

    def add() -> None:
        if output.numel():
            parts = memory[0].data.view(-1, output.numel()).unbind()
            with torch.inference_mode(output.is_inference()):  # what it was made in
                reduce_in_rank_order(parts, output.view(-1), op)
        for each in memory:
            each.pool.put_back(each.block)

    return SeveralWorks(() if work is None else (work,), add)


@dataclass(frozen=True, slots=True)
class AllToAllTransport(ProcessGroupTransport):
    """The process group's gathers; reductions by an all-to-all and additions in rank order.

    For process groups over a network whose own reduce-scatter is slow, as gloo's is; between two
    ranks its gathers are exchanged, too (see ``pairwise``). The sum does not depend on timing. A
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
        arrived = _Parts(input.numel(), input, process_group)
        work = all_to_all(arrived.data, input, process_group, async_op)
        return awaited(_reducing(work, [arrived], output, op), async_op)

    narrow_gather = ProcessGroupTransport.narrow_gather  # see [Note: capabilities]

    def narrow_reduce(
        self, process_group: dist.ProcessGroup, device: torch.device
    ) -> NarrowLaunch | None:
        """Return one all-to-all, in which ranks without a slice receive the mask."""
        return None if traits_of(device).streams else self._reduce_slices

    def _reduce_slices(
        self, packed: Buffer, process_group: dist.ProcessGroup, op: ReduceOp
    ) -> dist.Work:
        """Launch the reduction: in this rank's slice, or in the mask, that of every rank."""
        slices, rank, size = packed.all_slices, process_group.rank(), process_group.size()
        check_reduction(op, packed.tensor.dtype)
        parts = [*slices, *[packed.mask[0]] * (size - len(slices))]
        numels = [part.numel() for part in parts]
        sent = _Parts(sum(numels), packed.tensor, process_group)
        torch.cat(parts, out=sent.data)
        arrived = _Parts(size * numels[rank], packed.tensor, process_group)
        work = all_to_all(arrived.data, sent.data, process_group, True, numels)
        return _reducing(work, [arrived, sent], parts[rank], op)
