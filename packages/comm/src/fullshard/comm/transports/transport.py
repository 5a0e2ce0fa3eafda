"""Transports, which move the bytes of collectives.

The main class is ``Transport``: two methods that move buffers, and capabilities with defaults. A
transport gets complete flat buffers; ``buffers`` allocates them and ``layouts`` encodes tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.required import require
from fullshard.comm.transports.contribution import PartsReducer

__all__ = [
    "GatherBuffer",
    "MovesBuffers",
    "ProcessGroupTransport",
    "SelfTransport",
    "Transport",
    "WithoutCapabilities",
    "adapted",
]


class MovesBuffers(Protocol):
    """The methods that every transport has, whatever its base class."""

    @property
    def in_place(self) -> bool:
        """Whether a gather's input may be this rank's slice of its output."""

    @abstractmethod
    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        process_group: dist.ProcessGroup,
        async_op: bool,
        /,
    ) -> dist.Work | None:
        """Every rank's ``input`` (``[n]``) in ``output`` (``[world * n]``), in rank order."""

    @abstractmethod
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

    ``Transport.open_shared_buffer`` returns one.
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


class Transport(MovesBuffers, ABC):
    """Moves flat contiguous buffers between the ranks of a process group.

    A transport of a user's own needs ``in_place``, ``all_gather`` and ``reduce_scatter``, and no
    base class. A subclass of this class may override capabilities, which are the other methods.
    Each capability is called once for each process group, device and operation, on all ranks, and
    must return equal answers on all ranks. [Note: capabilities] Capabilities replace the two
    methods. A subclass that overrides one method therefore inherits no capability that replaces it.
    """

    __slots__ = ()

    @property
    def in_place(self) -> bool:
        """True: a gather's input may be this rank's slice of its output."""
        return True

    @property
    def is_automatic(self) -> bool:
        """Whether this is the default, in whose place a policy may put another transport."""
        return False

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset inherited capabilities that would replace an overridden method."""
        super().__init_subclass__(**options)
        for method, capabilities in _REPLACED_BY.items():
            for name in capabilities:
                if _depth(cls, name) > _depth(cls, method):
                    setattr(cls, name, Transport.__dict__[name])

    def resolve(self, process_group: dist.ProcessGroup, device: torch.device) -> Transport:
        """Return the transport to use for tensors on ``device`` until the next resolution."""
        return self

    def aliases_input(self, process_group: dist.ProcessGroup) -> bool:
        """Return whether an output may be its input, so that nothing moves."""
        return False

    def is_set_up(self, process_group: dist.ProcessGroup, device: torch.device) -> bool:
        """Return whether small tensors travel faster this way than by the process group, now.

        Answers are equal on all ranks. The call communicates nothing, so the first collective of a
        process group must have set up what the transport needs.
        """
        return False

    def exchange(
        self,
        process_group: dist.ProcessGroup,
        device: torch.device,
        nbytes: int,
        write: Callable[[torch.Tensor], None],
        read: Callable[[torch.Tensor], None],
    ) -> dist.Work | None:
        """Return an exchange in flight through memory that all ranks map, or None on all ranks.

        Args:
            process_group: the ranks.
            device: where the values are that the ranks exchange.
            nbytes: of the memory; equal on all ranks.
            write: called at once with the memory, ``[nbytes]`` uint8; ranks write different parts.
            read: called with it when all ranks have written, in the handle's ``wait()`` or before.
        """
        return None

    def open_shared_buffer(
        self, process_group: dist.ProcessGroup, nbytes: int
    ) -> GatherBuffer | None:
        """Return memory that all ranks map, in which gathers replace ``all_gather``, or None."""
        return None

    def parts_reducer(
        self, process_group: dist.ProcessGroup, device: torch.device, op: ReduceOp
    ) -> PartsReducer | None:
        """Return an object that reduces gradients without packing, or None."""
        return None

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        process_group: dist.ProcessGroup,
        async_op: bool,
        /,
    ) -> dist.Work | None:
        """Every rank's ``tensor`` reduced, in place, by the process group."""
        work: dist.Work | None = dist.all_reduce(tensor, op, process_group, async_op)
        return work


def _depth(cls: type, name: str) -> int:
    """Return how far up in the order of base classes ``name`` is defined."""
    return next(depth for depth, base in enumerate(cls.__mro__) if name in base.__dict__)


_SHARED_BY_BOTH = ("resolve", "aliases_input", "is_automatic")
_REPLACED_BY = {
    "all_gather": (*_SHARED_BY_BOTH, "open_shared_buffer"),
    "reduce_scatter": (*_SHARED_BY_BOTH, "parts_reducer"),
}


@dataclass(frozen=True, slots=True)
class ProcessGroupTransport(Transport):
    """The process group's own collectives."""

    all_gather = staticmethod(compat.gather_into)  # one launch each, and no frame of ours
    reduce_scatter = staticmethod(compat.reduce_scatter_into)
    all_reduce: ClassVar[Callable[..., dist.Work | None]] = staticmethod(dist.all_reduce)
    """Reduce a tensor in place over the ranks of a process group, as ``dist.all_reduce`` does."""


@dataclass(frozen=True, slots=True)
class SelfTransport(Transport):
    """World size 1: nothing moves. An output that is its input is left alone; others are copied."""

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

    def aliases_input(self, process_group: dist.ProcessGroup) -> bool:
        """Return True for one rank."""
        return process_group.size() == 1

    @staticmethod
    def all_reduce(*given: object) -> None:
        """Nothing: over one rank a tensor is its own sum."""


@dataclass(frozen=True, slots=True)
class WithoutCapabilities(Transport):
    """A transport of which only ``in_place`` and the two methods are used."""

    moves: MovesBuffers

    @property
    def in_place(self) -> bool:
        """The answer of the transport."""
        return self.moves.in_place

    def all_gather(self, *given: Any) -> dist.Work | None:
        """Call the transport."""
        return self.moves.all_gather(*given)

    def reduce_scatter(self, *given: Any) -> dist.Work | None:
        """Call the transport."""
        return self.moves.reduce_scatter(*given)


def adapted(transport: MovesBuffers) -> Transport:
    """Return a transport that states its capabilities: ``transport``, or a wrapper.

    Raises:
        TypeError: if it lacks a method, or its ``in_place`` is no bool.
    """
    require(Transport, transport)
    in_place: object = getattr(transport, "in_place", None)  # a user's may have none
    if not isinstance(in_place, bool):
        raise TypeError(
            f"got {type(transport).__name__}, which is no Transport: its in_place is "
            f"{in_place!r}; it must be True where a gather's input may be this rank's slice of "
            "its output, else False."
        )
    return transport if isinstance(transport, Transport) else WithoutCapabilities(transport)
