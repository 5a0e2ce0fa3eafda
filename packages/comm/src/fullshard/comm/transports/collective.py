"""The two collectives as objects: they allocate buffers, and they are called.

``AllGather`` and ``ReduceScatter`` are the interfaces, with torch's signatures. A user's own object
needs only their methods. The defaults are a transport and an allocator, each of them replaceable.
``Collective`` finds once what the engine may do with a collective. ``default`` has the transport of
a process group for which nobody chose one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import (
    Allocates,
    Allocator,
    BufferMemory,
    CachingAllocator,
)
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime.required import require
from fullshard.comm.runtime.works import SeveralWorks
from fullshard.comm.transports.contribution import PartsReducer
from fullshard.comm.transports.rank_order import is_reduction
from fullshard.comm.transports.transport import (
    MovesBuffers,
    ProcessGroupTransport,
    Transport,
    WithoutCapabilities,
    adapted,
)

__all__ = [
    "EPOCH",
    "AllGather",
    "Collective",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "ReduceScatter",
    "Route",
    "require_work",
]


class AllGather(Allocates, Protocol):
    """An all-gather: anything with these two methods; subclass it to plug in your own."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (``[world * n]``) with every rank's ``input_tensor`` (``[n]``).

        ``input_tensor`` is usually this rank's slice of ``output_tensor``. With ``async_op`` it may
        return before it is done, and then gives a work handle whose ``wait()`` finishes it; None
        means that it is done (on the current stream).
        """


class ReduceScatter(Allocates, Protocol):
    """A reduce-scatter: anything with these two methods; subclass it to plug in your own."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` (``[n]``) with this rank's part of the reduced ``input_tensor``.

        ``input_tensor`` is ``[world * n]``.

        With ``async_op`` it may return before it is done, and then gives a work handle whose
        ``wait()`` finishes it.
        """


class _Composed:
    """A transport and an allocator."""

    def __init__(
        self, *, transport: MovesBuffers | None = None, allocator: Allocator | None = None
    ) -> None:
        self.transport: MovesBuffers = ProcessGroupTransport() if transport is None else transport
        self.allocator: Allocator = CachingAllocator() if allocator is None else allocator
        self._moves = adapted(self.transport)
        require(Allocator, self.allocator)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor from the allocator."""
        return self.allocator.empty(size, dtype=dtype, device=device)

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


_NO_CAPABILITIES = WithoutCapabilities(ProcessGroupTransport())
EPOCH = [0]
"""One number, which grows when settings change that decide between transports."""


@dataclass(frozen=True, slots=True)
class Route:
    """The functions that implement the collectives of one process group, device and operation.

    A plan looks its route up once, and again when settings change. ``launch`` ends at the process
    group, ``runtime.compat.gather_into`` say, or in memory that ranks share.

    Attributes:
        launch: takes a collective's tensors, process group (operation) and ``async_op``, in this
            order, and returns a work handle or None. A user's code is ``checked``.
        parts: reduces gradients that are not packed, if possible.
        epoch: the value of ``EPOCH`` at the resolution. A route of an earlier epoch is stale.
    """

    launch: Callable[..., dist.Work | None]
    parts: PartsReducer | None = None
    epoch: int = field(default_factory=lambda: EPOCH[0])


class Collective(BufferMemory):
    """What the engine may do with a collective.

    A user's own collective is only called. A default collective is not called: the engine calls its
    transport, unless a subclass overrides ``__call__`` or ``allocate``. Capabilities that replace
    calls of the transport need the default allocator, too.

    Attributes:
        offers: the capabilities of a transport that may replace calls of the collective.
    """

    def __init__(self, comm: AllGather | ReduceScatter) -> None:
        """Adapt ``comm``, which has the methods of its interface, as it is now.

        A transport or allocator that is assigned to it later is not seen.
        """
        self._comm = comm
        self._mover: object = comm  # for messages
        self._moves: Transport | None = None  # called in place of the collective
        self.offers: Transport = _NO_CAPABILITIES
        self.allocate, self.allocates = comm.allocate, f"{type(comm).__name__}.allocate"
        if isinstance(comm, _Composed):
            self.allocates += f" (its {type(comm.allocator).__name__}.empty)"
            # Other allocators may have other rules for the reuse of their memory.
            self.reusable = isinstance(comm.allocator, CachingAllocator)
            # The methods of a subclass see every buffer.
            own = type(comm)
            calls = DefaultAllGather.__call__, DefaultReduceScatter.__call__
            if own.__call__ in calls and own.allocate is _Composed.allocate:
                self._mover, self._moves = comm.transport, comm._moves
                self.allocate = comm.allocator.empty
                if self.reusable:
                    self.offers = comm._moves

    @property
    def is_automatic(self) -> bool:
        """Whether the user chose neither the collective nor its transport."""
        return self._moves is not None and self._moves.is_automatic

    def gather_route(self, process_group: dist.ProcessGroup, device: torch.device) -> Route:
        """Return the functions that gather. A collective call at a process group's first time."""
        if self._moves is None or not self._moves.in_place:
            return self._called_by("output_tensor", "input_tensor", "group", "async_op")
        transport = self._moves.resolve(process_group, device)
        return Route(self._checked(transport.all_gather))

    def reduce_route(
        self, process_group: dist.ProcessGroup, device: torch.device, op: ReduceOp
    ) -> Route:
        """Return the functions that reduce. A collective call at a process group's first time."""
        parts = self.offers.parts_reducer(process_group, device, op)
        if self._moves is None or not is_reduction(op):
            route = self._called_by("output_tensor", "input_tensor", "group", "op", "async_op")
            return replace(route, parts=parts)
        transport = self._moves.resolve(process_group, device)
        return Route(self._checked(transport.reduce_scatter), parts)

    def _called_by(self, *names: str) -> Route:
        """Return a call of the collective itself, with arguments of these names."""
        comm = self._comm
        return Route(checked(comm, lambda *given: comm(**dict(zip(names, given, strict=True)))))

    def _checked(self, launch: Callable[..., dist.Work | None]) -> Callable[..., dist.Work | None]:
        """Return ``launch`` of the transport, whose answer is checked if a user chose it."""
        return launch if self.is_automatic else checked(self._mover, launch)


def checked(
    mover: object, launch: Callable[..., dist.Work | None]
) -> Callable[..., dist.Work | None]:
    """Return ``launch`` with a check of its answer, which a user's code gives.

    The check raises a ``TypeError`` that names ``mover`` if the answer is neither None nor a work
    handle.
    """

    def launch_and_check(*given: Any) -> dist.Work | None:
        work = launch(*given)
        if work is not None:
            require_work(mover, work)
        return work

    return launch_and_check


def require_work(mover: object, answer: object) -> None:
    """Require that the answer of a user's ``mover`` is a work handle.

    Raises:
        TypeError: if the answer has no ``wait()``.
    """
    if not callable(getattr(answer, "wait", None)):  # a work handle of a user's own, perhaps
        raise TypeError(
            f"{type(mover).__name__} gave {answer!r}; it must give None once it is done, or a "
            "work handle whose wait() finishes it."
        )
