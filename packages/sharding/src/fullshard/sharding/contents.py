"""What a group's gather moves, and what its parameters are made of once it has arrived.

Owns the protocol that ``Gathering`` is written against, and the ordinary contents: one tensor per
parameter, filled in place. Parameters with hooks around their gather are ``hooked``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from fullshard.comm import AllGatherInFlight, CommStreams, FullTensors, Layout
from fullshard.sharding.param import FSDPParam
from fullshard.sharding.store import OwnStore

__all__ = ["GatherContents", "PlainContents"]


class GatherContents(Protocol):
    """What does a group's gather move, and where to?"""

    @property
    def layout(self) -> Layout:
        """Where everything lies in the gather whose ``shards`` were asked for last."""
        ...

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """The tensors that a gather writes, in the order of the layout."""
        ...

    def shards(
        self, staged: Sequence[torch.Tensor], streams: CommStreams
    ) -> Sequence[torch.Tensor]:
        """Returns what this rank gives to a gather, in the order of the layout.

        Args:
            staged: the shard of each parameter, as the copy-in stream sees it.
            streams: where to compute what must be.
        """
        ...

    def allocate(self) -> None:
        """Gets the memory to gather into."""
        ...

    def filled(self, in_flight: AllGatherInFlight) -> Sequence[torch.Tensor] | FullTensors:
        """Returns ``fills`` for the copy-out of a gather; they have their memory."""
        ...

    def complete(self) -> None:
        """Makes the unsharded parameters of what was gathered."""
        ...

    def free(self) -> None:
        """Gives the memory back."""
        ...


class PlainContents:
    """Each parameter is one tensor, which is gathered as it is used."""

    def __init__(self, params: Sequence[FSDPParam], store: OwnStore, layout: Layout) -> None:
        """Takes the memory of all of ``params``; what the modules see is made already."""
        self.layout = layout
        self._store = store
        self._to_travel = [param.kind.to_travel for param in params]
        self._filled: dict[Layout, FullTensors] = {}  # a smaller world has a layout of its own

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """One tensor per parameter."""
        return self._store.fills

    def shards(
        self, staged: Sequence[torch.Tensor], streams: CommStreams
    ) -> Sequence[torch.Tensor]:
        """Returns one tensor per parameter: its shard."""
        return [to_travel(shard) for to_travel, shard in zip(self._to_travel, staged, strict=True)]

    def allocate(self) -> None:
        """Gets the memory to gather into."""
        self._store.allocate()

    def filled(self, in_flight: AllGatherInFlight) -> FullTensors:
        """Returns the same for all gathers of a layout."""
        full = self._filled.get(in_flight.layout)
        if full is None:
            full = FullTensors(self.fills, in_flight.layout, in_flight.lane)
            self._filled[in_flight.layout] = full
        return full

    def complete(self) -> None:
        """Nothing: what was filled is what modules see."""

    def free(self) -> None:
        """Gives the memory back."""
        self._store.free()
