"""Gathers several small groups in one launch.

Owns that launch and its copy-out. Each group stays its own: its parameters are freed when its own
last lease returns. It refuses to choose the groups: see ``buckets``.

[Note: coalesced gathers] The first group of a bucket to be gathered takes the others along, as if
each had been prefetched. That happens only while all of them are sharded and as they were when the
bucket was made; else a group is gathered by itself. Both must be facts that all ranks see alike
(see [Note: shared facts]), so a group that a graph may keep unsharded is in no bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import Generic, Protocol, TypeVar

from fullshard.comm import (
    AllGatherInFlight,
    EventKind,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from fullshard.comm.collectives.gather import FullTensors, OwnShards
from fullshard.comm.runtime.observer import emit
from fullshard.sharding.base.states import ShardedState
from fullshard.sharding.gather.gathering import Gathering
from fullshard.sharding.params.plan import rank_major

__all__ = ["CoalescedGather", "CoalescedGroup"]


class CoalescedGroup(Protocol):
    """What is asked of each group."""

    @property
    def gathering(self) -> Gathering:
        """Its parameters."""

    def hold_prefetched(self) -> None:
        """Takes the lease of whoever uses it next."""


G = TypeVar("G", bound=CoalescedGroup)


class CoalescedGather(Generic[G]):
    """Groups whose gathers share a launch; each takes part in it as in one of its own.

    Attributes:
        groups: in the order in which they are gathered.
    """

    def __init__(self, groups: Sequence[G]) -> None:
        """Takes groups that may be gathered with others."""
        self.groups = tuple(groups)
        gatherings = [group.gathering for group in groups]
        self._made_of = [
            (each, strategy, each.config)
            for each in gatherings
            if (strategy := each.coalescing) is not None
        ]
        specs = tuple(spec for each in gatherings for spec in each.layout.specs)
        self._layout = rank_major(specs, gatherings[0].layout.world_size, 0)
        name = f"{gatherings[0].name} to {gatherings[-1].name}"
        self._config = replace(gatherings[0].config, name=name)
        self._parts: list[OwnShards] = []
        self._own: OwnShards | None = None  # made of those
        self._full: FullTensors | None = None
        self._in_flight: AllGatherInFlight | None = None

    @property
    def void(self) -> bool:
        """Whether a group is no longer as it was when this was made."""
        return any(
            each.coalescing is not strategy or each.config is not config
            for each, strategy, config in self._made_of
        )

    def launch(self, asker: G, *, ahead: bool) -> bool:
        """Gathers all groups if that is possible now, and tells whether it was.

        Args:
            asker: the group that somebody wants.
            ahead: nobody holds ``asker`` yet: it is prefetched, as the others are.
        """
        sharded = ShardedState.SHARDED
        if asker.gathering.state is not sharded:
            return False  # as of all groups but the first, which launched theirs
        if self.void or any(each.state is not sharded for each, _, _ in self._made_of):
            return False
        ahead_of = [group for group in self.groups if group is not asker or ahead]
        for group in ahead_of:
            emit(EventKind.PREFETCH, group.gathering.name, rank=group.gathering.rank)
        own = self._joined([each.announce().inputs.of(each.config) for each, _, _ in self._made_of])
        self._in_flight = foreach_all_gather(own, self._layout, self._config)
        for group in ahead_of:
            group.hold_prefetched()
        for each, _, _ in self._made_of:
            each.begin(self)
        return True

    def _joined(self, parts: list[OwnShards]) -> OwnShards:
        """Returns what travels of all groups: the same as the last time, if it does of each."""
        if self._own is not None and all(map(is_, parts, self._parts)):
            return self._own
        shards = [shard for part in parts for shard in part.tensors]
        own = OwnShards(shards, self._layout, self._config)
        kept = all(strategy.inputs.kept is not None for _, strategy, _ in self._made_of)
        self._parts, self._own = (parts, own) if kept else ([], None)
        return own

    def land(self, *, private: bool, movable: bool) -> None:
        """Waits and copies the parts of all groups out; later calls do nothing.

        All get their memory now; those that gave their part up give it back.
        """
        if self._in_flight is None:
            return
        for _, strategy, _ in self._made_of:
            strategy.memory.allocate()
        if self._full is None:
            outputs = [fill for _, strategy, _ in self._made_of for fill in strategy.memory.fills]
            self._full = FullTensors(outputs, self._layout, self._config)
        foreach_all_gather_copy_out(self._in_flight, self._full)
        self._in_flight = None
        for each, strategy, _ in self._made_of:
            if each.state is ShardedState.SHARDED:
                strategy.memory.free()

    def discard(self) -> None:
        """Gives one group's part up; waits with the last."""
        in_flight = self._in_flight
        wanted = any(each.in_flight is self for each, _, _ in self._made_of)
        if in_flight is not None and in_flight.buffer is not None and not wanted:
            in_flight.discard()
            self._in_flight = None
