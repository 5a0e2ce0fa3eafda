"""The contract of an unshard strategy: how a group's shards become full parameters.

Owns the protocol that ``Gathering`` is written against. There is one class for each way: packed
into buffers (``buffered``), in memory that the ranks of a host share (``shared_buffer``), the
shards themselves in a world of one (``aliased``), with hooks of the parameters around it
(``hooked``), over the few ranks of a post-forward mesh (``post_forward``), several groups in one
launch (``coalesced``). A group's is chosen at its first gather, from facts that all ranks share;
the last two wrap another.

[Note: two stores] Where ranks share memory, a group is gathered in a buffer that all of them map,
and its parameters lie there. Whether a gather is such a one follows from facts that all ranks
share. Where parameters lie is each rank's own affair: a user's ``unshard()`` gets private memory,
to which the shared buffer is copied, since a user may write; and while a graph lives they stay
where its forward had them. So the end of a graph, which ranks notice at different times, changes no
collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from fullshard.comm import GatherConfig, Layout
from fullshard.sharding.gather.buffered import BufferedUnshard

__all__ = ["UnshardInFlight", "UnshardStrategy"]


class UnshardInFlight(Protocol):
    """What becomes of a gather that was launched?"""

    def land(self, *, private: bool, movable: bool) -> None:
        """Waits for the gather and makes the unsharded parameters of what came.

        Args:
            private: a user holds them, who may write.
            movable: no graph holds an alias of them.
        """
        ...

    def discard(self) -> None:
        """Waits for a gather that nobody wants; nothing happens if it has landed."""
        ...


class UnshardStrategy(UnshardInFlight, Protocol):
    """How is a group gathered, and where to?

    One gather at a time: ``launch``, then ``land`` or ``discard``; ``free`` ends either.
    """

    @property
    def layout(self) -> Layout:
        """Where everything lies in the gather that was launched last."""
        ...

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """The tensors that a gather writes, in the order of the layout."""
        ...

    @property
    def coalesces(self) -> BufferedUnshard | None:
        """What may be gathered with other groups in one launch now; None: this may not."""
        ...

    def launch(
        self, staged: Sequence[torch.Tensor], config: GatherConfig, *, async_op: bool
    ) -> None:
        """Issues a gather.

        Args:
            staged: the shard of each parameter, as the copy-in stream sees it.
            config: what to gather with.
            async_op: ask for a work handle on accelerators, too.
        """
        ...

    def free(self) -> None:
        """Gives the memory back."""
        ...
