"""The default collectives: a transport and an allocator, each of them replaceable.

The main classes are ``DefaultAllGather`` and ``DefaultReduceScatter``. These classes use the
capabilities of a transport only with the default allocator, and if no subclass overrides
``__call__`` or ``allocate``. ``same_host`` chooses the transport of a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import Allocator, CachingAllocator
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime.required import require
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.same_host.same_host import AutomaticTransport
from fullshard.comm.transports.collective import (
    AllGather,
    Collective,
    ReduceScatter,
    Route,
    checked,
)
from fullshard.comm.transports.rank_order import is_reduction
from fullshard.comm.transports.transport import (
    MovesBuffers,
    ProcessGroupTransport,
    SelfTransport,
    Transport,
    WithoutCapabilities,
    adapted,
)

__all__ = [
    "DefaultAllGather",
    "DefaultReduceScatter",
    "default_all_gather",
    "default_reduce_scatter",
]


class _Composed(Collective):
    """A transport and an allocator, and what both default collectives do with them."""

    def __init__(
        self, *, transport: MovesBuffers | None = None, allocator: Allocator | None = None
    ) -> None:
        self.transport: MovesBuffers = ProcessGroupTransport() if transport is None else transport
        self.allocator: Allocator = CachingAllocator() if allocator is None else allocator
        self._moves = adapted(self.transport)
        require(Allocator, self.allocator)
        # Other allocators may have other rules for the reuse of their memory.
        self.reusable = isinstance(self.allocator, CachingAllocator)
        # The methods of a subclass see every buffer: the transport is never called directly.
        own = cast("type[DefaultAllGather] | type[DefaultReduceScatter]", type(self))
        calls = DefaultAllGather.__call__, DefaultReduceScatter.__call__
        self._composes = own.__call__ in calls and own.allocate is _Composed.allocate
        self.allocates = f"{own.__name__}.allocate (its {type(self.allocator).__name__}.empty)"
        if own.allocate is _Composed.allocate:  # no frame of ours
            self.allocate = self.allocator.empty  # type: ignore[assignment,method-assign]
        plain = self._composes and self.reusable  # most capabilities need the default allocator
        self.offers = self._moves if plain else WithoutCapabilities(self.transport)

    @property
    def _comm(self) -> AllGather | ReduceScatter:  # type: ignore[override]  # no cycle
        return cast("AllGather | ReduceScatter", self)

    @property
    def is_automatic(self) -> bool:
        """Whether the user chose neither the collective nor its transport."""
        return self._composes and self._moves.is_automatic

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor from the allocator."""
        return self.allocator.empty(size, dtype=dtype, device=device)

    def coalesces_with(self, other: Collective) -> bool:
        """Whether both call equal transports, and do nothing more."""
        return (
            isinstance(other, _Composed)
            and self._composes
            and other._composes
            and self.transport == other.transport
        )

    def gather_route(self, process_group: dist.ProcessGroup, device: torch.device) -> Route:
        """The transport, called directly if buffers are sent unchanged."""
        if not (self._composes and self._moves.in_place):
            return super().gather_route(process_group, device)
        transport = self._moves.resolve(process_group, device)
        narrow = transport.narrow_gather(device) if self.reusable else None
        return Route(self._checked(transport.all_gather), narrow and self._checked(narrow))

    def reduce_route(
        self, process_group: dist.ProcessGroup, device: torch.device, op: ReduceOp
    ) -> Route:
        """The transport, called directly for known operations."""
        parts = self.offers.parts_reducer(process_group, device, op)
        if not (self._composes and is_reduction(op)):
            return replace(super().reduce_route(process_group, device, op), parts=parts)
        transport = self._moves.resolve(process_group, device)
        narrow = transport.narrow_reduce(process_group, device) if self.reusable else None
        checked_narrow = narrow and self._checked(narrow)
        return Route(self._checked(transport.reduce_scatter), checked_narrow, parts)

    def _checked(self, launch: Callable[..., dist.Work | None]) -> Callable[..., dist.Work | None]:
        """Return ``launch`` of the transport, whose answer is checked if a user chose it."""
        return launch if self.is_automatic else checked(self.transport, launch)

    def __repr__(self) -> str:
        """The class and its two choices."""
        return f"{type(self).__name__}(transport={self.transport!r}, allocator={self.allocator!r})"


class DefaultAllGather(_Composed, AllGather):
    """An all-gather composed of a transport and an allocator.

    Args:
        transport: who moves the bytes; the process group by default.
        allocator: where buffers come from; torch's caching allocator by default.

    Raises:
        TypeError: if one of the two lacks a member, which is named.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; the input is copied where it may not be a part of the output."""
        if self.transport.in_place:
            return self.transport.all_gather(output_tensor, input_tensor, group, async_op)
        own = input_tensor.clone()
        work = self.transport.all_gather(output_tensor, own, group, async_op)
        return None if work is None else SeveralWorks((work,), partial(_keep, own))


class DefaultReduceScatter(_Composed, ReduceScatter):
    """A reduce-scatter composed of a transport and an allocator.

    Args:
        transport: who moves the bytes; the process group by default.
        allocator: where buffers come from; torch's caching allocator by default.

    Raises:
        TypeError: if one of the two lacks a member, which is named.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce and scatter."""
        return self.transport.reduce_scatter(output_tensor, input_tensor, group, op, async_op)


def _keep(*tensors: torch.Tensor) -> None:
    """Do nothing: the arguments of this call keep the tensors alive until then."""


def default_all_gather(process_group: dist.ProcessGroup) -> DefaultAllGather:
    """The default all-gather: *self* for one rank, ``AutomaticTransport`` for several."""
    return DefaultAllGather(transport=_default_transport(process_group))


def default_reduce_scatter(process_group: dist.ProcessGroup) -> DefaultReduceScatter:
    """The default reduce-scatter: *self* for one rank, ``AutomaticTransport`` for several."""
    return DefaultReduceScatter(transport=_default_transport(process_group))


def _default_transport(process_group: dist.ProcessGroup) -> Transport:
    return SelfTransport() if process_group.size() == 1 else AutomaticTransport()
