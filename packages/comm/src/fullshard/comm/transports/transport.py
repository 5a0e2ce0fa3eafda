"""Transports, which move the bytes of collectives.

Owns: one of the three independent choices of a collective. Refuses: allocating and encoding: it is
handed finished flat buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist

from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime import compat

__all__ = [
    "GatherBuffer",
    "ProcessGroupTransport",
    "SelfTransport",
    "Transport",
]


class Transport(Protocol):
    """Moves flat contiguous buffers between the ranks of a process group."""

    @property
    def in_place(self) -> bool:
        """Whether a gather's input may be this rank's slice of its output."""

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        async_op: bool,
        /,
    ) -> dist.Work | None:
        """Every rank's ``input`` (``[n]``) in ``output`` (``[world * n]``), in rank order."""

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


class GatherBuffer(Protocol):
    """Memory that all ranks of a process group map, and the gathers that fill it.

    Transports with such memory have a method ``open_shared_buffer(process_group, nbytes)``, which
    returns a buffer, or None on all ranks.
    """

    @property
    def memory(self) -> torch.Tensor:
        """The memory, ``[n]`` uint8. Readers must not write: other ranks read it too."""

    def gather(self, write: Callable[[], None]) -> dist.Work:
        """A gather in flight: ``write`` was called, once no rank read what was there before."""

    def move_out(self) -> None:
        """Map private pages at these addresses until ``leave()``, so that this rank may write.

        For tensors that must stay at these addresses, and are filled by other means than a gather
        here. The present content may be lost.
        """

    def leave(self) -> None:
        """Report that this rank no longer reads the last gather; later calls do nothing."""


@dataclass(frozen=True, slots=True)
class ProcessGroupTransport:
    """The process group's own collectives."""

    in_place: ClassVar[bool] = True  # gloo and NCCL accept the rank's own slice of the output
    all_gather = staticmethod(compat.gather_into)  # one launch each, and no frame of ours
    reduce_scatter = staticmethod(compat.reduce_scatter_into)
    all_reduce: ClassVar[Callable[..., dist.Work | None]] = staticmethod(dist.all_reduce)


@dataclass(frozen=True, slots=True)
class SelfTransport:
    """World size 1: nothing moves. An output that is its input is left alone; others are copied."""

    in_place: ClassVar[bool] = True  # an input that is its own output costs nothing

    @staticmethod
    def all_gather(
        output: torch.Tensor, input: torch.Tensor, process_group: dist.ProcessGroup, *how: object
    ) -> None:
        """``output`` equal to ``input``, as is the sum, and the average, over one rank.

        Finished on return, so never a work handle.
        """
        if process_group.size() != 1:
            raise ValueError(
                f"SelfTransport got a process group of {process_group.size()} ranks; it is for "
                "world size 1. Use ProcessGroupTransport()."
            )
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)

    reduce_scatter = all_gather

    @staticmethod
    def all_reduce(*given: object) -> None:
        """Nothing: over one rank a tensor is its own sum."""
