"""The two collectives as objects: what they need is to allocate, and to be called.

Owns: the interfaces ``AllGather`` and ``ReduceScatter``, with torch's signatures, and the errors of
what does not have them. Classes that users wrote for torch's ``fully_shard`` plug in unchanged:
nothing here tests ``isinstance``. Refuses: knowing a layout: a collective sees flat buffers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

import torch
import torch.distributed as dist

from fullshard.comm.buffers.allocator import Allocates
from fullshard.comm.layouts.scaling import ReduceOp

__all__ = ["AllGather", "ReduceScatter", "no_work"]


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


def no_work(comm: AllGather | ReduceScatter, answer: object) -> TypeError:
    """The error for a collective that gave neither a work handle nor None."""
    choice = getattr(comm, "transport", comm)  # a composed one passes on its transport's
    return TypeError(
        f"{type(choice).__name__} gave {answer!r}; it must give None once it is done, or a work "
        "handle whose wait() finishes it."
    )
