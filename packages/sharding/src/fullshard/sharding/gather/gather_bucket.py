"""Small groups that are gathered one after another, in one launch.

Owns the launch that the groups share and its copy-out. Each group stays its own: its parameters are
freed when its own last lease returns. It refuses to choose the groups: see ``buckets``.

[Note: joined gathers] The first group of a bucket to be gathered takes the others along, as if each
had been prefetched. That happens only while all of them are sharded and as they were when the
bucket was made; else a group is gathered by itself. Both must be facts that all ranks see alike
(see [Note: shared facts]), so a group that a graph may keep unsharded is in no bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fullshard.comm import (
    AllGatherInFlight,
    EventKind,
    FullTensors,
    emit,
    foreach_all_gather,
    foreach_all_gather_copy_out,
)
from fullshard.sharding.base.leases import LeaseKind
from fullshard.sharding.base.states import ShardedState
from fullshard.sharding.gather.contents import JoinedGather, PlainContents, TravellingShards
from fullshard.sharding.params.plan import rank_major

if TYPE_CHECKING:
    from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = ["GatherBucket"]


class GatherBucket:
    """Groups whose gathers share a launch.

    Attributes:
        groups: in the order in which they were gathered.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        """Takes groups that have a part to bring, and whose lanes join."""
        self.groups = tuple(groups)
        self._parts = [part for group in groups if (part := group.part) is not None]
        specs = tuple(spec for part in self._parts for spec in part.layout.specs)
        self._layout = rank_major(specs, self._parts[0].layout.world_size, 0)
        name = f"{groups[0].name} to {groups[-1].name}"
        self._lane = replace(self._parts[0].lane, name=name)
        params = [param for group in groups for param in group.params]
        self._travelling = TravellingShards(params, self._layout)
        self._full: FullTensors | None = None

    @property
    def void(self) -> bool:
        """Whether a group is no longer as it was when the bucket was made."""
        return any(
            group.part is not part for group, part in zip(self.groups, self._parts, strict=True)
        )

    def gather(self, asker: FSDPParamGroup, *, ahead: bool) -> bool:
        """Gathers all groups if that is possible now, and tells whether it did.

        Args:
            asker: the group that somebody wants.
            ahead: nobody holds ``asker`` yet: it is prefetched, as the others are.
        """
        if asker.state is not ShardedState.SHARDED or self.void:
            return False
        if any(group.state is not ShardedState.SHARDED for group in self.groups):
            return False
        ahead_of = [group for group in self.groups if group is not asker or ahead]
        for group in ahead_of:
            emit(EventKind.PREFETCH, group.name, rank=group.rank)
        staged = [shard for group in self.groups for shard in group.gathering.stage()]
        in_flight = foreach_all_gather(
            self._travelling.of(staged, self._lane), self._layout, self._lane
        )
        joint = _JointGather(self, in_flight)
        for group in ahead_of:
            group.leases.hold(LeaseKind.PREFETCH)
        for place, group in enumerate(self.groups):
            group.gathering.join(JoinedGather(joint, place))
        return True

    def copy_out(self, in_flight: AllGatherInFlight) -> None:
        """Fills the memory of all groups, which they get now."""
        outputs = [tensor for contents in self.contents for tensor in contents.make_room()]
        if self._full is None:
            self._full = FullTensors(outputs, self._layout, self._lane)
        foreach_all_gather_copy_out(in_flight, self._full)

    @property
    def contents(self) -> list[PlainContents]:
        """What the groups gather."""
        return [part.contents for part in self._parts]


class _JointGather:
    """One launch in flight, and who of the bucket still wants its part."""

    def __init__(self, bucket: GatherBucket, in_flight: AllGatherInFlight) -> None:
        self._bucket = bucket
        self._in_flight: AllGatherInFlight | None = in_flight
        self._dropped: set[int] = set()

    def land(self) -> None:
        """Waits and copies all parts out; later calls do nothing."""
        if self._in_flight is None:
            return
        self._bucket.copy_out(self._in_flight)
        self._in_flight = None
        for place in self._dropped:
            self._bucket.contents[place].free()

    def drop(self, place: int) -> None:
        """Gives a part up; waits with the last."""
        self._dropped.add(place)
        if self._in_flight is not None and len(self._dropped) == len(self._bucket.groups):
            self._in_flight.discard()
            self._in_flight = None
