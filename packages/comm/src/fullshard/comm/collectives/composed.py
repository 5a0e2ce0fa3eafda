"""The default collectives: a transport and an allocator, each of them replaceable.

Owns: their composition, and what a transport can do beyond moving a buffer: the transport offers
this only if the allocator is the default one and no subclass overrides ``__call__``. Refuses:
choosing who moves the bytes of a process group (see ``same_host``), and what travels: that is the
layout's (see ``TensorSpec``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import Allocator, CachingAllocator
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime.required import require
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.same_host.same_host import AutomaticTransport
from fullshard.comm.transports.collective import AllGather, ReduceScatter
from fullshard.comm.transports.config import GatherConfig, ReduceConfig
from fullshard.comm.transports.first_ranks import first_gatherer, first_reducer
from fullshard.comm.transports.rank_order import is_reduction
from fullshard.comm.transports.transport import (
    ProcessGroupTransport,
    SelfTransport,
    Transport,
)

__all__ = [
    "DefaultAllGather",
    "DefaultReduceScatter",
    "choose_gather",
    "choose_reduction",
    "default_all_gather",
    "default_reduce_scatter",
]


class _Composed:
    """The two choices, and what both default collectives do with them."""

    def __init__(
        self, *, transport: Transport | None = None, allocator: Allocator | None = None
    ) -> None:
        self.transport: Transport = ProcessGroupTransport() if transport is None else transport
        self.allocator: Allocator = CachingAllocator() if allocator is None else allocator
        self._check()
        # Whether several collectives may reuse memory from ``allocate``, one after another: only
        # for the caching allocator; other allocators may have other rules.
        self.reusable = isinstance(self.allocator, CachingAllocator)
        own = cast("type[DefaultAllGather] | type[DefaultReduceScatter]", type(self)).__call__
        composes = own in (DefaultAllGather.__call__, DefaultReduceScatter.__call__)
        # Whether only the transport has to see each buffer.
        self._direct = composes and self.transport.in_place
        # Features that a transport has in addition to moving a buffer. The features are used only
        # with the default allocator and without a subclass's own ``__call__``. Every feature is a
        # collective call.
        self._plain = composes and self.reusable
        offers = self.transport if self._plain else None
        self.open_shared_buffer = getattr(offers, "open_shared_buffer", _nothing)
        self.parts_reducer = getattr(offers, "parts_reducer", _nothing)
        self.coalesced_up_to = getattr(offers, "coalesced_up_to", _nothing)

    def _check(self) -> None:
        require(Transport, self.transport)
        in_place = getattr(self.transport, "in_place", None)
        if not isinstance(in_place, bool):
            raise TypeError(
                f"got {type(self.transport).__name__}, which is no Transport: its in_place is "
                f"{in_place!r}; it must be True where a gather's input may be this rank's slice of "
                "its output, else False."
            )
        require(Allocator, self.allocator)

    def serving(self, group: dist.ProcessGroup, device: torch.device) -> Transport | None:
        """The transport to be called instead of this object; None: nobody. A collective call.

        The transport is called directly if buffers are sent unchanged and no subclass overrides
        ``__call__``.
        """
        if not self._direct:
            return None
        transport = self.transport
        if type(transport) is AutomaticTransport:
            return transport.chosen(group, device)
        return transport

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor from the allocator."""
        return self.allocator.empty(size, dtype=dtype, device=device)

    def aliases_input(self, group: dist.ProcessGroup) -> bool:
        """Whether the output of a collective may be its input, so that nothing is moved.

        True for *self* with the default allocator, unless a subclass overrides ``__call__``.
        """
        return type(self.transport) is SelfTransport and group.size() == 1 and self._plain

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
        kept = partial(_nothing, own)  # the copy, until the work is waited for
        return None if work is None else SeveralWorks((work,), kept)


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


def choose_gather(config: GatherConfig) -> None:
    """Choose the functions that implement the collectives; see ``Dispatch``. A collective call."""
    comm, chosen, transport = config.comm, config.chosen, None
    if isinstance(comm, DefaultAllGather):
        transport = comm.serving(config.process_group, config.device)
        if transport is not None and comm.reusable:
            chosen.narrow_launch = first_gatherer(transport, config.device)
    names = ("output_tensor", "input_tensor", "group", "async_op")
    chosen.launch = _by_name(comm, names) if transport is None else transport.all_gather


def choose_reduction(config: ReduceConfig) -> None:
    """Choose the functions that implement the collectives; see ``Dispatch``. A collective call."""
    comm, group, op = config.comm, config.process_group, config.scaling.op
    chosen, transport = config.chosen, None
    if isinstance(comm, DefaultReduceScatter) and is_reduction(op):
        transport = comm.serving(group, config.device)
        if transport is not None and comm.reusable:
            chosen.narrow_launch = first_reducer(transport, group, config.device)
    chosen.parts = getattr(comm, "parts_reducer", _nothing)(group, config.device, op)
    names = ("output_tensor", "input_tensor", "group", "op", "async_op")
    chosen.launch = _by_name(comm, names) if transport is None else transport.reduce_scatter


def _by_name(
    comm: AllGather | ReduceScatter, names: Sequence[str]
) -> Callable[..., dist.Work | None]:
    """Return a function that calls a collective by the names of its arguments."""
    return lambda *given: comm(**dict(zip(names, given, strict=True)))


def _nothing(*arguments: object) -> None:
    """Do nothing: the default for features that a transport lacks."""


def default_all_gather(process_group: dist.ProcessGroup) -> DefaultAllGather:
    """The default all-gather: *self* for one rank, ``AutomaticTransport`` for several."""
    return DefaultAllGather(transport=_default_transport(process_group))


def default_reduce_scatter(process_group: dist.ProcessGroup) -> DefaultReduceScatter:
    """The default reduce-scatter: *self* for one rank, ``AutomaticTransport`` for several."""
    return DefaultReduceScatter(transport=_default_transport(process_group))


def _default_transport(process_group: dist.ProcessGroup) -> Transport:
    return SelfTransport() if process_group.size() == 1 else AutomaticTransport()
