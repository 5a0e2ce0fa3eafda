"""The two collectives as objects: they allocate buffers, and they are called.

``AllGather`` and ``ReduceScatter`` are the interfaces, with torch's signatures. A user's own object
needs only their methods; ``Collective`` adapts it once, and states the capabilities of all others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import Allocates, BufferMemory
from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.transports.contribution import PartsReducer
from fullshard.comm.transports.transport import (
    NarrowLaunch,
    ProcessGroupTransport,
    Transport,
    WithoutCapabilities,
)

__all__ = ["EPOCH", "AllGather", "Collective", "ReduceScatter", "Route", "checked", "require_work"]


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
        narrow_launch: replaces ``launch`` where only the first ranks hold data; see
            ``Transport.narrow_gather`` and ``narrow_reduce``.
        parts: reduces gradients that are not packed, if possible.
        epoch: the value of ``EPOCH`` at the resolution. A route of an earlier epoch is stale.
    """

    launch: Callable[..., dist.Work | None]
    narrow_launch: NarrowLaunch | None = None
    parts: PartsReducer | None = None
    epoch: int = field(default_factory=lambda: EPOCH[0])


class Collective(BufferMemory):
    """The capabilities of a collective, as the engine asks for them.

    The defaults are those of a collective of a user's own: it is only called.

    Attributes:
        offers: the capabilities of a transport that may replace calls of the collective.
    """

    offers: Transport = WithoutCapabilities(ProcessGroupTransport())

    def __init__(self, comm: AllGather | ReduceScatter) -> None:
        """Adapt ``comm``, which has the methods of its interface."""
        self._comm = comm
        self.allocate = comm.allocate
        self.allocates = f"{type(comm).__name__}.allocate"

    @staticmethod
    def of(comm: AllGather | ReduceScatter) -> Collective:
        """Return ``comm`` itself if it is a ``Collective``; otherwise adapt it."""
        return comm if isinstance(comm, Collective) else Collective(comm)

    @property
    def is_automatic(self) -> bool:
        """Whether the user chose neither the collective nor its transport."""
        return False

    def coalesces_with(self, other: Collective) -> bool:
        """Return whether one launch of either may move the buffers of both."""
        return False

    def gather_route(self, process_group: dist.ProcessGroup, device: torch.device) -> Route:
        """Return the functions that gather. A collective call at a process group's first time."""
        names = "output_tensor", "input_tensor", "group", "async_op"
        comm = self._comm
        return Route(checked(comm, lambda *given: comm(**dict(zip(names, given, strict=True)))))

    def reduce_route(
        self, process_group: dist.ProcessGroup, device: torch.device, op: ReduceOp
    ) -> Route:
        """Return the functions that reduce. A collective call at a process group's first time."""
        names = "output_tensor", "input_tensor", "group", "op", "async_op"
        comm = self._comm
        return Route(checked(comm, lambda *given: comm(**dict(zip(names, given, strict=True)))))


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
