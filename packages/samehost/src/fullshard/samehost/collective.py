"""Describes one collective in shared memory, and compares it with what other ranks launched.

Owns: what must be equal on all ranks, and the error of ranks that launched different collectives.
Refuses: running it; see ``shared_group``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fullshard.comm import CollectiveMismatchError
from fullshard.samehost.signals import Message, MessageKind

__all__ = ["Pending", "SharedCollective", "gather_in_place", "mismatch"]

_NAMES: dict[int, str] = {
    MessageKind.GATHER: "a gather",
    MessageKind.REDUCE: "a reduce-scatter",
    MessageKind.ALL_REDUCE: "an all-reduce",
}


@dataclass(frozen=True, kw_only=True)
class SharedCollective:
    """A rank's part of a collective, and the message that describes it to other ranks.

    Attributes:
        kind: the kind of the message that reports that this rank's part is complete.
        nbytes: of a rank's part; ranks compare it together with ``kind`` and ``detail``.
        detail: what else must be equal on all ranks.
        region: how many bytes of the segment it needs; follows from the above.
        write: puts this rank's part into the region.
        read: takes the result from the region.
    """

    kind: MessageKind
    nbytes: int
    detail: int
    region: int
    write: Callable[[torch.Tensor], None]
    read: Callable[[torch.Tensor], None]

    def is_of(self, message: Message) -> bool:
        """Whether the sender of ``message`` has called an equal collective."""
        theirs = (message.kind, message.value, message.detail)
        return theirs == (self.kind, self.nbytes, self.detail)


@dataclass(eq=False)
class Pending:
    """A collective that was launched; ``open`` is None once it has ended, with its inputs."""

    number: int
    open: tuple[SharedCollective, torch.Tensor] | None


def gather_in_place(nbytes: int, buffer: int) -> SharedCollective:
    """Return a gather in a buffer, for which each rank itself writes and reads.

    Args:
        nbytes: size of the buffer.
        buffer: number of the buffer, from 1. Buffers share pages, so ranks that gather in
            different buffers would read each other's parts of other tensors.
    """
    return SharedCollective(
        kind=MessageKind.GATHER,
        nbytes=nbytes,
        detail=buffer,
        region=nbytes,
        write=lambda memory: None,
        read=lambda memory: None,
    )


def mismatch(mine: SharedCollective, theirs: Message, rank: int) -> CollectiveMismatchError:
    """Return the error for a ``rank`` that called a different collective."""
    said, other = _described(mine.kind, mine.nbytes), _described(theirs.kind, theirs.value)
    if said == other:
        gathers = mine.kind == MessageKind.GATHER
        other += " of other tensors" if gathers else " in another dtype or by another reduction"
    return CollectiveMismatchError(
        f"this rank is in {said}, rank {rank} in {other}. Run the same modules in the same "
        "order on every rank; set_debug_mode(True) says where they part."
    )


def _described(kind: int, nbytes: int) -> str:
    if name := _NAMES.get(kind):
        return f"{name} of {nbytes} bytes per rank"
    if kind == MessageKind.EXCHANGE:
        return f"an exchange of {nbytes} bytes"
    return "a larger collective than any before"
