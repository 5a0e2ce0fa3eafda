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
from typing import Any, Generic, Protocol, TypeVar

from fullshard.comm import (
    AllGatherInFlight,
    EventKind,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from fullshard.comm.collectives.gather import FullTensors
from fullshard.comm.runtime.observer import emit
from fullshard.sharding.base.states import ShardedState
from fullshard.sharding.gather.buffered import BufferedUnshard
from fullshard.sharding.gather.gathering import Gathering
from fullshard.sharding.gather.inputs import GatherInputs
from fullshard.sharding.params.plan import rank_major

__all__ = ["CoalescedGather", "CoalescedGroup"]


class CoalescedGroup(Protocol):
    """What is asked of each group."""

    @property
    def gathering(self) -> Gathering:
        """Its parameters."""
        ...

    def hold_prefetched(self) -> None:
        """Takes the lease of whoever uses it next."""
        ...


G = TypeVar("G", bound=CoalescedGroup)


class CoalescedGather(Generic[G]):
    """Groups whose gathers share a launch.

    Attributes:
        groups: in the order in which they are gathered.
    """

    def __init__(self, groups: Sequence[G]) -> None:
        """Takes groups that may be gathered with others."""
        self.groups = tuple(groups)
        gatherings = [group.gathering for group in groups]
        self._made_of = [
            (each, buffered, each.config)
            for each in gatherings
            if (buffered := each.buffered) is not None
        ]
        specs = tuple(spec for each in gatherings for spec in each.layout.specs)
        self._layout = rank_major(specs, gatherings[0].layout.world_size, 0)
        name = f"{gatherings[0].name} to {gatherings[-1].name}"
        self._config = replace(gatherings[0].config, name=name)
        params = [param for each in gatherings for param in each.params]
        self._inputs = GatherInputs(params, self._layout)
        self._full: FullTensors | None = None

    @property
    def void(self) -> bool:
        """Whether a group is no longer as it was when this was made."""
        return any(
            each.buffered is not strategy or each.config is not config
            for each, strategy, config in self._made_of
        )

    def launch(self, asker: G, *, ahead: bool) -> bool:
        """Gathers all groups if that is possible now, and tells whether it was.

        Args:
            asker: the group that somebody wants.
            ahead: nobody holds ``asker`` yet: it is prefetched, as the others are.
        """
        sharded = ShardedState.SHARDED
        if self.void or any(each.state is not sharded for each, _, _ in self._made_of):
            return False
        ahead_of = [group for group in self.groups if group is not asker or ahead]
        for group in ahead_of:
            emit(EventKind.PREFETCH, group.gathering.name, rank=group.gathering.rank)
        staged = [shard for each, _, _ in self._made_of for shard in each.stage()]
        shards = self._inputs.of(staged, self._config)
        launched = _Launched(self, foreach_all_gather(shards, self._layout, self._config))
        for group in ahead_of:
            group.hold_prefetched()
        for each, strategy, _ in self._made_of:
            each.begin(_Part(launched, strategy))
        return True

    def copy_out(self, in_flight: AllGatherInFlight) -> None:
        """Fills the memory of all groups, which they get now."""
        outputs = [tensor for _, buffered, _ in self._made_of for tensor in buffered.make_room()]
        if self._full is None:
            self._full = FullTensors(outputs, self._layout, self._config)
        foreach_all_gather_copy_out(in_flight, self._full)


class _Launched:
    """One launch in flight, and which of its groups do not want their part."""

    def __init__(self, gather: CoalescedGather[Any], in_flight: AllGatherInFlight) -> None:
        self._gather = gather
        self._in_flight: AllGatherInFlight | None = in_flight
        self._dropped: list[BufferedUnshard] = []

    def land(self) -> None:
        """Waits and copies all parts out; later calls do nothing."""
        if self._in_flight is None:
            return
        self._gather.copy_out(self._in_flight)
        self._in_flight = None
        for strategy in self._dropped:
            strategy.free()

    def drop(self, strategy: BufferedUnshard) -> None:
        """Gives a part up; waits with the last."""
        self._dropped.append(strategy)
        if self._in_flight is not None and len(self._dropped) == len(self._gather.groups):
            self._in_flight.discard()
            self._in_flight = None


class _Part:
    """One group's part in the launch."""

    def __init__(self, launched: _Launched, strategy: BufferedUnshard) -> None:
        self._launched = launched
        self._strategy = strategy

    def land(self, *, private: bool, movable: bool) -> None:
        """Waits and copies the parts of all groups out, unless another did."""
        self._launched.land()

    def discard(self) -> None:
        """Gives the part up."""
        self._launched.drop(self._strategy)
