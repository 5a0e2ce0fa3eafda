"""Who moves the bytes.

Owns: one of the three independent choices of a collective. Refuses: allocating and encoding: it is
handed finished flat buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.devices import traits_of
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.transports.contribution import Contribution

__all__ = [
    "GatherBuffer",
    "ProcessGroupTransport",
    "SelfTransport",
    "Transport",
]

# Dtypes that every backend moves. Others (int16 and float8 over gloo, for example) are moved as the
# bytes they are.
_MOVED_AS_THEY_ARE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)


class Transport(Protocol):
    """Moves flat contiguous buffers between the ranks of a process group."""

    @property
    def in_place(self) -> bool:
        """Whether a gather's input may be this rank's slice of its output."""
        raise NotImplementedError

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        async_op: bool,
        /,
    ) -> dist.Work | None:
        """Every rank's ``input`` (``[n]``) in ``output`` (``[world * n]``), in rank order."""
        raise NotImplementedError

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool,
        /,
    ) -> dist.Work | None:
        """In ``output`` (``[n]``), this rank's part of the reduced ``input`` (``[world * n]``)."""
        raise NotImplementedError


class GatherBuffer(Protocol):
    """Memory that all ranks of a process group map, and the gathers that fill it.

    A transport that can make such memory has a method
    ``open_shared_buffer(process_group, nbytes)``, which gives one, or None on all ranks.
    """

    @property
    def memory(self) -> torch.Tensor:
        """All of it, ``[n]`` uint8. Whoever reads it must not write: others read it, too."""
        raise NotImplementedError

    def gather(self, write: Callable[[], None]) -> dist.Work:
        """A gather in flight: ``write`` was called, once no rank read what was there before."""
        raise NotImplementedError

    def move_out(self) -> None:
        """Gives the addresses pages of this rank's own until ``leave()``: it may write there.

        For tensors that must stay at these addresses, and are filled by other means than a gather
        here. What is there may be lost.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Says that this rank reads the result of the last gather no more; again: nothing."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ProcessGroupTransport:
    """The process group's own collectives."""

    @property
    def in_place(self) -> bool:
        """True: gloo and NCCL accept the rank's own slice of the output as input."""
        return True

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """One gather launch; dtypes that a backend may not know travel as bytes."""
        if output.dtype not in _MOVED_AS_THEY_ARE:
            output, input = output.view(torch.uint8), input.view(torch.uint8)
        return compat.gather_into(output, input, process_group, async_op)

    reduce_scatter = staticmethod(compat.reduce_scatter_into)  # one launch, and no frame of ours


@dataclass(frozen=True, slots=True)
class SelfTransport:
    """World size 1: nothing moves. An output that is its input is left alone; others are copied."""

    @property
    def in_place(self) -> bool:
        """True: an input that is its own output costs nothing."""
        return True

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """``output`` equal to ``input``; finished on return, so never a work handle."""
        self._copy(output, input, process_group)
        return None

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool,
    ) -> dist.Work | None:
        """``output`` equal to ``input``: the sum, and the average, over one rank."""
        self._copy(output, input, process_group)
        return None

    def parts_reducer(
        self, process_group: dist.ProcessGroup, device: torch.device, op: ReduceOp
    ) -> SelfTransport | None:
        """This transport, but for devices with streams, of which it knows nothing."""
        return None if traits_of(device).streams else self

    def reduce_parts(
        self,
        allocate: Callable[[], torch.Tensor],
        contribution: Contribution,
        process_group: dist.ProcessGroup,
        op: ReduceOp,
    ) -> dist.Work:
        """Gradients copied to what ``allocate`` gives from where they lie; finished on return."""
        self._check(process_group)
        output = allocate()
        with torch.inference_mode(output.is_inference()):  # what it was made in
            contribution.write(output.view(-1), range(1))
        return SeveralWorks(())

    def _copy(
        self, output: torch.Tensor, input: torch.Tensor, process_group: dist.ProcessGroup
    ) -> None:
        self._check(process_group)
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)

    def _check(self, process_group: dist.ProcessGroup) -> None:
        if process_group.size() != 1:
            raise ValueError(
                f"SelfTransport got a process group of {process_group.size()} ranks; it is for "
                "world size 1. Use ProcessGroupTransport()."
            )
