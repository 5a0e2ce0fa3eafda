"""Reduce-scatters by an all-to-all: each rank gets the others' parts, and adds them itself.

Owns the transport, and the memory in which parts arrive. Gloo's own reduce-scatter adds on the way,
in steps that wait for each other; an all-to-all sends every byte once, at once, and what has
arrived is added in rank order, bf16 and fp16 in fp32. ``automatic`` chooses it.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fullshard.comm import ProcessGroupTransport, ReduceOp
from fullshard.comm.spi import (
    BlockPool,
    SeveralWorks,
    all_to_all,
    awaited,
    check_reduction,
    exchange,
    is_served,
    reduce_in_rank_order,
    traits_of,
)

__all__ = ["AllToAllTransport"]

_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, BlockPool] = weakref.WeakKeyDictionary()


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
            return ProcessGroupTransport.all_gather(output, input, process_group, async_op)
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
