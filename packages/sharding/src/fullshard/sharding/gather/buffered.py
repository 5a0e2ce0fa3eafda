"""Gathers a group through buffers: shards are packed, gathered, and copied out where they belong.

Owns the gather in flight and the copy-out. It is the ordinary strategy, and the one where
parameters lie in memory of this rank alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from fullshard.comm import (
    AllGatherInFlight,
    GatherConfig,
    Layout,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from fullshard.comm.collectives.gather import FullTensors
from fullshard.sharding.gather.inputs import GatherInputs
from fullshard.sharding.gather.memory import UnshardedMemory

__all__ = ["BufferedUnshard", "PackedUnshard"]


class PackedUnshard(ABC):
    """A gather of packed buffers, in flight or not: what such strategies share.

    Attributes:
        layout: where everything lies in the gather that was launched last.
        in_flight: the gather, until it lands.
    """

    def __init__(self, layout: Layout) -> None:
        """Starts without one."""
        self.layout = layout
        self.in_flight: AllGatherInFlight | None = None

    def launch_packed(
        self,
        shards: Sequence[torch.Tensor],
        layout: Layout,
        config: GatherConfig,
        *,
        async_op: bool,
    ) -> None:
        """Issues a gather of ``shards``, the part of each of ``fills`` that this rank has."""
        self.in_flight = foreach_all_gather(shards, layout, config, async_op=async_op)

    @property
    @abstractmethod
    def fills(self) -> Sequence[torch.Tensor]:
        """The tensors that a gather writes."""

    @abstractmethod
    def land(self, *, private: bool, movable: bool) -> None:
        """Waits, of whichever layout the gather was, and copies out."""

    @abstractmethod
    def free(self) -> None:
        """Gives the memory back."""

    def taken(self) -> AllGatherInFlight:
        """Returns the gather in flight, which is the caller's to end."""
        in_flight, self.in_flight = self.in_flight, None
        assert in_flight is not None, "it was launched"
        return in_flight

    def discard(self) -> None:
        """Waits for a gather that nobody wants."""
        if self.in_flight is not None:
            self.taken().discard()


class BufferedUnshard(PackedUnshard):
    """Each parameter is one tensor, copied out of the buffers of its group."""

    def __init__(self, memory: UnshardedMemory, inputs: GatherInputs, layout: Layout) -> None:
        """Takes the memory, and what is sent, of all parameters."""
        super().__init__(layout)
        self._memory = memory
        self._inputs = inputs
        self._full: FullTensors | None = None  # of this layout
        self._filled: dict[Layout, FullTensors] = {}  # a post-forward mesh has one of its own

    @property
    def fills(self) -> Sequence[torch.Tensor]:
        """One tensor per parameter, where it lies."""
        return self._memory.home.fills

    @property
    def coalesces(self) -> BufferedUnshard | None:
        """Itself, if parameters lie in private memory."""
        return self if self._memory.home is self._memory else None

    def make_room(self) -> Sequence[torch.Tensor]:
        """Returns the tensors that a gather of several groups fills, which have memory now."""
        self._memory.allocate()
        return self._memory.fills

    def launch(
        self, staged: Sequence[torch.Tensor], config: GatherConfig, *, async_op: bool
    ) -> None:
        """Issues a gather of one tensor per parameter: its shard."""
        shards = self._inputs.of(staged, config)
        self.in_flight = foreach_all_gather(shards, self.layout, config, async_op=async_op)

    def land(self, *, private: bool, movable: bool) -> None:
        """Waits and copies out: to private memory, unless a graph keeps them elsewhere."""
        in_flight, self.in_flight = self.in_flight, None
        memory = self._memory
        assert in_flight is not None, "it was launched"
        if memory.home is not memory:  # of a collective that was replaced since
            memory.move(memory, movable=movable)
        home = memory.home
        home.allocate()
        full = self._full
        if full is None or full.layout is not in_flight.layout or home is not memory:
            full = self._full_of(in_flight)
        foreach_all_gather_copy_out(in_flight, full)

    def _full_of(self, in_flight: AllGatherInFlight) -> FullTensors:
        """Returns what to fill, which has its memory: the same for all gathers of a layout."""
        home, layout = self._memory.home, in_flight.layout
        if home is not self._memory:
            return FullTensors(home.fills, layout, in_flight.config)
        if layout not in self._filled:
            self._filled[layout] = FullTensors(home.fills, layout, in_flight.config)
        full = self._filled[layout]
        if layout is self.layout:
            self._full = full
        return full

    def free(self) -> None:
        """Gives the memory back."""
        self._memory.free()
