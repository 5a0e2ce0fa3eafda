"""Groups whose gathers share a launch.

Owns the launch and the copy-out of a bucket. Each group stays its own: its parameters are freed
when its own last lease returns.

[Note: coalesced gathers] The first gather in a bucket gathers all its groups, as if each had been
prefetched. A bucket is gathered only while all its groups are sharded and unchanged since the
bucket was made; else a group is gathered by itself. The conditions must be facts that all ranks see
alike, so a group that a graph may keep unsharded is in no bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fullshard.comm import AllGatherInFlight, EventKind
from fullshard.comm.spi import LISTENERS, FullTensors, emit, rank_major
from fullshard.sharding import FSDPParamGroup, LeaseKind, ShardedState
from fullshard.sharding.spi import BufferedUnshard, GatherInputs, Holders

__all__ = ["Bucket", "own_way"]


def own_way(group: FSDPParamGroup) -> BufferedUnshard | None:
    """Return how ``group`` is gathered, if others may be gathered with it; else None.

    Through buffers into private memory, from the stored shards; not by the hooks of a subclass.
    """
    gathering = group.gathering
    strategy = gathering.strategy
    if type(strategy) is not BufferedUnshard or type(strategy.inputs) is not GatherInputs:
        return None
    kept = gathering.kept_by_graphs or gathering.keeps_full or len(group.roots) > 1
    return strategy if strategy.memory.home is strategy.memory and not kept else None


class Bucket:
    """Groups whose gathers share a launch; a group takes part as in a gather of its own.

    Attributes:
        groups: in the order in which they are gathered.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        """Take groups that may be gathered with others."""
        self.groups = tuple(groups)
        self._made_of = [
            (group, strategy, group.gathering.config)
            for group in groups
            if (strategy := own_way(group)) is not None
        ]
        params = [param for group in groups for param in group.params]
        gatherings = [group.gathering for group in groups]
        specs = tuple(spec for each in gatherings for spec in each.layout.specs)
        layout = rank_major(specs, gatherings[0].layout.world_size, 0)
        self._inputs = GatherInputs(params, layout)
        name = f"{groups[0].name} to {groups[-1].name}"
        self._config = replace(gatherings[0].config, name=name)
        self._full: FullTensors | None = None

    @property
    def void(self) -> bool:
        """Whether a group is no longer as it was when this was made."""
        return not all(
            own_way(group) is strategy and group.gathering.config is config
            for group, strategy, config in self._made_of
        )

    def launch(self, asker: FSDPParamGroup, *, ahead: bool) -> bool:
        """Gather all groups if they are sharded and unchanged, and return whether they were.

        Args:
            asker: the group that a caller wants.
            ahead: no module holds ``asker`` yet: it is prefetched, as the others are.
        """
        states = {group.gathering.state for group in self.groups}
        if states != {ShardedState.SHARDED} or self.void:
            return False
        ahead_of = [group for group in self.groups if group is not asker or ahead]
        for group in ahead_of if LISTENERS else ():
            emit(EventKind.PREFETCH, group.name, rank=group.rank)
        for group, strategy, _ in self._made_of:
            group.gathering.announce(strategy)
        in_flight = self._inputs.sends(self._config).gather(self._config)
        for group in ahead_of:
            group.leases.add_once(LeaseKind.PREFETCH)
        for group, _, _ in self._made_of:
            group.gathering.set_in_flight(in_flight, self)
        return True

    def finish(self, in_flight: AllGatherInFlight, holders: Holders) -> None:
        """Wait and copy the parts of all groups out; later calls only wait.

        Every group gets its memory now; those that gave their part up give it back.
        """
        if in_flight.buffer is None:
            in_flight.wait()  # raises again if it did
            return
        for _, strategy, _ in self._made_of:
            strategy.memory.allocate()
        if self._full is None:
            outputs = [
                fill for _, strategy, _ in self._made_of for fill in strategy.memory.write_views
            ]
            self._full = FullTensors(outputs, self._inputs.layout, self._config)
        self._full.fill(in_flight)
        for group, strategy, _ in self._made_of:
            if group.gathering.state is ShardedState.SHARDED:
                strategy.memory.free()

    def discard(self, in_flight: AllGatherInFlight) -> None:
        """Give one group's part up; wait with the last."""
        wanted = any(group.gathering.in_flight is in_flight for group, _, _ in self._made_of)
        if in_flight.buffer is not None and not wanted:
            in_flight.discard()
