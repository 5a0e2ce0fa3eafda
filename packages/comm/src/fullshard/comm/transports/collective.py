"""The two collectives as objects: what they need is to allocate, and to be called.

Owns: the interfaces ``AllGather`` and ``ReduceScatter``, with torch's signatures, and the errors of
what does not have them. Classes that users wrote for torch's ``fully_shard`` plug in unchanged:
nothing here tests ``isinstance``. Refuses: knowing a layout: a collective sees flat buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.distributed as dist

from fullshard.comm.layouts.scaling import ReduceOp
from fullshard.comm.runtime.required import Method, require_methods

__all__ = [
    "AllGather",
    "AllGatherLike",
    "Comm",
    "ReduceScatter",
    "ReduceScatterLike",
    "no_work",
    "require_all_gather",
    "require_reduce_scatter",
]


class Comm(ABC):
    """What every collective can do: allocate the buffers that it is then called with."""

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A contiguous tensor of ``size``; its contents may be anything."""


class AllGather(Comm):
    """Interface of an all-gather; subclass it to plug in your own."""

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


class ReduceScatter(Comm):
    """Interface of a reduce-scatter; subclass it to plug in your own."""

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


class AllGatherLike(Protocol):
    """Anything with the two methods of ``AllGather``."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A contiguous tensor of ``size``."""
        raise NotImplementedError

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of every rank into ``output_tensor``."""
        raise NotImplementedError


class ReduceScatterLike(Protocol):
    """Anything with the two methods of ``ReduceScatter``."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A contiguous tensor of ``size``."""
        raise NotImplementedError

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` over ranks into ``output_tensor``."""
        raise NotImplementedError


_ALLOCATE = Method("allocate", ("dtype", "device"), positional=("size",))
_ALL_GATHER = (
    Method("__call__", ("output_tensor", "input_tensor", "group", "async_op")),
    _ALLOCATE,
)
_REDUCE_SCATTER = (
    Method("__call__", ("output_tensor", "input_tensor", "group", "op", "async_op")),
    _ALLOCATE,
)


def require_all_gather(value: object) -> AllGatherLike:
    """``value`` itself, once it is known to have the methods of an all-gather.

    Raises:
        TypeError: naming the method or argument that is missing.
    """
    advice = "Add the methods, or subclass fullshard.comm.AllGather."
    require_methods(value, "AllGather", _ALL_GATHER, advice)
    return cast("AllGatherLike", value)


def require_reduce_scatter(value: object) -> ReduceScatterLike:
    """``value`` itself, once it is known to have the methods of a reduce-scatter.

    Raises:
        TypeError: naming the method or argument that is missing.
    """
    advice = "Add the methods, or subclass fullshard.comm.ReduceScatter."
    require_methods(value, "ReduceScatter", _REDUCE_SCATTER, advice)
    return cast("ReduceScatterLike", value)


def no_work(comm: AllGatherLike | ReduceScatterLike, answer: object) -> TypeError:
    """The error for a collective that gave neither a work handle nor None."""
    choice = getattr(comm, "transport", comm)  # a composed one passes on its transport's
    return TypeError(
        f"{type(choice).__name__} gave {answer!r}; it must give None once it is done, or a work "
        "handle whose wait() finishes it."
    )
