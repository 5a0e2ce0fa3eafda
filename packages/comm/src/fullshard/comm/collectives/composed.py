"""The default collectives: a transport, an allocator and a codec, each of them replaceable.

Owns: their composition, and what a transport can do beyond moving a buffer: that is offered only
where no other choice, and no subclass, wants a say. Refuses: choosing who moves the bytes of a
process group (see ``same_host``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import Allocator, CachingAllocator
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.same_host.same_host import AutomaticTransport
from fullshard.comm.transports import choices
from fullshard.comm.transports.codec import Codec, IdentityCodec
from fullshard.comm.transports.collective import AllGather, ReduceScatter
from fullshard.comm.transports.contribution import PartsReducer
from fullshard.comm.transports.decoding import DecodingWork, Transfer
from fullshard.comm.transports.transport import (
    GatherBuffer,
    ProcessGroupTransport,
    SelfTransport,
    Transport,
)

__all__ = [
    "DefaultAllGather",
    "DefaultReduceScatter",
    "default_all_gather",
    "default_reduce_scatter",
]


class _Composed:
    """The three choices, and what both default collectives do with them."""

    def __init__(
        self,
        *,
        transport: Transport | None = None,
        allocator: Allocator | None = None,
        codec: Codec | None = None,
    ) -> None:
        transport = ProcessGroupTransport() if transport is None else transport
        self.transport: Transport = choices.require_transport(transport)
        allocator = CachingAllocator() if allocator is None else allocator
        self.allocator: Allocator = choices.require_allocator(allocator)
        self.codec: Codec = choices.require_codec(IdentityCodec() if codec is None else codec)

        # Whether memory that ``allocate`` gave may serve several collectives, one after another:
        # the caching allocator's; what another means by it is its own.
        self.reusable = isinstance(self.allocator, CachingAllocator)
        as_it_is = type(self.codec) is IdentityCodec and self.transport.in_place
        # Whether nobody but the transport is to see each buffer.
        self._direct = as_it_is and not self._calls_its_own
        self._plain = self.reusable and isinstance(self.codec, IdentityCodec)

    def serving(self, group: dist.ProcessGroup, device: torch.device) -> Transport | None:
        """The transport to be called instead of this object; None: nobody. A collective call.

        So it is where buffers travel as they are, and no subclass has a ``__call__`` of its own.
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

    def coalesced_up_to(self, group: dist.ProcessGroup, device: torch.device) -> int:
        """Bytes of one rank's slice up to which collectives had better share a launch; 0: never.

        As its transport says; 0 where a codec, an allocator or a subclass's own ``__call__`` is to
        see each. A collective call: all ranks find the same.
        """
        limit = self._offered("coalesced_up_to")
        return 0 if limit is None else int(limit(group, device))

    def aliases_input(self, group: dist.ProcessGroup) -> bool:
        """Whether the input of a collective is its output as it lies: nothing need be moved.

        So it is for *self*, unless a codec, an allocator or a subclass's own ``__call__`` wants a
        say.
        """
        alone = type(self.transport) is SelfTransport and group.size() == 1
        return alone and self._plain and not self._calls_its_own

    def _offered(self, name: str) -> Callable[..., Any] | None:
        """What the transport can do beyond moving a buffer, if nobody else wants a say."""
        if not self._plain or self._calls_its_own:
            return None
        return cast("Callable[..., Any] | None", getattr(self.transport, name, None))

    @property
    def _calls_its_own(self) -> bool:
        """Whether a subclass does more than compose."""
        own = cast("type[DefaultAllGather] | type[DefaultReduceScatter]", type(self)).__call__
        return own not in (DefaultAllGather.__call__, DefaultReduceScatter.__call__)

    def _wire_for(self, output: torch.Tensor) -> torch.Tensor:
        dtype = choices.wire_dtype(self.codec, output.dtype)
        if dtype is output.dtype:
            return output
        return self.allocator.empty(output.shape, dtype=dtype, device=output.device)

    def _finish(self, work: dist.Work | None, transfer: Transfer) -> dist.Work | None:
        if work is not None:
            return DecodingWork(work, self.codec, transfer) if transfer.coded else work
        self.codec.decode_into(transfer.wire, transfer.output)
        return None

    def __repr__(self) -> str:
        """The class and its three choices."""
        return (
            f"{type(self).__name__}(transport={self.transport!r}, allocator={self.allocator!r}, "
            f"codec={self.codec!r})"
        )


class DefaultAllGather(_Composed, AllGather):
    """An all-gather composed of a transport, an allocator and a codec.

    Args:
        transport: who moves the bytes; the process group by default.
        allocator: where buffers come from; torch's caching allocator by default.
        codec: what travels; buffers as they are by default.

    Raises:
        TypeError: if one of the three lacks a member, which is named.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; with ``async_op`` the returned handle's ``wait()`` also decodes."""
        if type(self.codec) is IdentityCodec and self.transport.in_place:
            return self.transport.all_gather(output_tensor, input_tensor, group, async_op)
        sent = choices.encoded(self.codec, input_tensor)
        wire = self._wire_for(output_tensor)
        if wire is output_tensor and not self.transport.in_place:
            sent = sent.clone()  # it may lie inside the output
        work = self.transport.all_gather(wire, sent, group, async_op)
        return self._finish(
            work, Transfer(input=input_tensor, sent=sent, wire=wire, output=output_tensor)
        )

    def open_shared_buffer(self, group: dist.ProcessGroup, nbytes: int) -> GatherBuffer | None:
        """Memory for gathers in place, if its transport has such and it does nothing else itself.

        A collective call. Engines gather in a shared buffer and do not call this object, so there
        is none where a codec, an allocator or a subclass's own ``__call__`` wants a say.
        """
        opener = self._offered("open_shared_buffer")
        return None if opener is None else cast("GatherBuffer | None", opener(group, nbytes))


class DefaultReduceScatter(_Composed, ReduceScatter):
    """A reduce-scatter composed of a transport, an allocator and a codec.

    The reduction itself happens in the wire's dtype.

    Args:
        transport: who moves the bytes; the process group by default.
        allocator: where buffers come from; torch's caching allocator by default.
        codec: what travels; buffers as they are by default.

    Raises:
        TypeError: if one of the three lacks a member, which is named.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce and scatter; with ``async_op`` the returned handle's ``wait()`` also decodes."""
        if type(self.codec) is IdentityCodec:
            return self.transport.reduce_scatter(output_tensor, input_tensor, group, op, async_op)
        sent = choices.encoded(self.codec, input_tensor)
        wire = self._wire_for(output_tensor)
        work = self.transport.reduce_scatter(wire, sent, group, op, async_op)
        return self._finish(
            work, Transfer(input=input_tensor, sent=sent, wire=wire, output=output_tensor)
        )

    def parts_reducer(
        self, group: dist.ProcessGroup, device: torch.device, op: ReduceOp
    ) -> PartsReducer | None:
        """What reduces gradients that are not packed, if its transport can and nothing is encoded.

        As for shared buffers, there is none where a codec, an allocator or a subclass's own
        ``__call__`` wants a say. All ranks find the same.
        """
        finder = self._offered("parts_reducer")
        return None if finder is None else cast("PartsReducer | None", finder(group, device, op))


def default_all_gather(process_group: dist.ProcessGroup) -> DefaultAllGather:
    """The default all-gather for a group: *self* for one rank, else ``AutomaticTransport``."""
    return DefaultAllGather(transport=_default_transport(process_group))


def default_reduce_scatter(process_group: dist.ProcessGroup) -> DefaultReduceScatter:
    """The default reduce-scatter for a group: *self* for one rank, else ``AutomaticTransport``."""
    return DefaultReduceScatter(transport=_default_transport(process_group))


def _default_transport(process_group: dist.ProcessGroup) -> Transport:
    return SelfTransport() if process_group.size() == 1 else AutomaticTransport()
