"""Gathers several small groups in one launch, by the order in which they were gathered before.

Owns the division of groups into buckets, and a bucket's launch and copy-out. Each group stays its
own: its parameters are freed when its own last lease returns.

[Note: learning order] After each forward of the root the groups that it gathered are known, in
order; those that follow one another, and are small enough for that to pay, make a bucket. The
modules that ran may differ between ranks; the gathers may not differ, so all ranks make equal
buckets. While there are ``CHECKS`` of collectives, no group is in a bucket: ranks then compare
their gathers group by group, so that an error names the group in which they differ.

[Note: coalesced gathers] The first gather in a bucket gathers all its groups, as if each had been
prefetched. A bucket is gathered only while all its groups are sharded and unchanged since the
bucket was made; else a group is gathered by itself. The conditions must be facts that all ranks see
alike (see [Note: shared facts]), so a group that a graph may keep unsharded is in no bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from operator import attrgetter

from fullshard.comm import AllGatherInFlight, EventKind, GatherConfig
from fullshard.comm.spi import (
    CHECKS,
    LISTENERS,
    FullTensors,
    coalescing_pays,
    configs_coalesce,
    emit,
    rank_major,
)
from fullshard.sharding.base.states import LeaseKind, ShardedState
from fullshard.sharding.gather.gathering import Gathering
from fullshard.sharding.gather.strategy import GatherInputs, Holders
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.reduce.coalesced import CoalescedReduction
from fullshard.sharding.reduce.reduction import ReductionQueue

__all__ = ["Bucket", "Buckets"]

_state_of = attrgetter("gathering.state")
_is_void = attrgetter("void")


class Bucket:
    """Groups whose gathers share a launch; a group takes part as in a gather of its own.

    Attributes:
        groups: in the order in which they are gathered.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        """Take groups that may be gathered with others."""
        self.groups = tuple(groups)
        gatherings = [group.gathering for group in groups]
        self._made_of = [
            (each, strategy, each.config)
            for each in gatherings
            if (strategy := each.coalescing) is not None
        ]
        params = [param for group in groups for param in group.params]
        specs = tuple(spec for each in gatherings for spec in each.layout.specs)
        layout = rank_major(specs, gatherings[0].layout.world_size, 0)
        self._inputs = GatherInputs(params, layout)
        name = f"{groups[0].name} to {groups[-1].name}"
        self._config = replace(gatherings[0].config, name=name)
        self._full: FullTensors | None = None

    @property
    def void(self) -> bool:
        """Whether a group is no longer as it was when this was made."""
        return not all(starmap(Gathering.coalesces_by, self._made_of))

    def launch(self, asker: FSDPParamGroup, *, ahead: bool) -> bool:
        """Gather all groups if they are sharded and unchanged, and return whether they were.

        Args:
            asker: the group that a caller wants.
            ahead: no module holds ``asker`` yet: it is prefetched, as the others are.
        """
        if self.void or {*map(_state_of, self.groups)} != {ShardedState.SHARDED}:
            return False
        ahead_of = [group for group in self.groups if group is not asker or ahead]
        for group in ahead_of if LISTENERS else ():
            emit(EventKind.PREFETCH, group.name, rank=group.rank)
        for each, strategy, _ in self._made_of:
            each.announce(strategy)
        in_flight = self._inputs.sends(self._config).gather(self._config)
        for group in ahead_of:
            group.leases.add_once(LeaseKind.PREFETCH)
        for each, _, _ in self._made_of:
            each.set_in_flight(in_flight, self)
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
        for each, strategy, _ in self._made_of:
            if each.state is ShardedState.SHARDED:
                strategy.memory.free()

    def discard(self, in_flight: AllGatherInFlight) -> None:
        """Give one group's part up; wait with the last."""
        wanted = any(each.in_flight is in_flight for each, _, _ in self._made_of)
        if in_flight.buffer is not None and not wanted:
            in_flight.discard()


class Buckets:
    """The buckets of one root.

    Attributes:
        gathered: the order that they were learnt from.
        gathers: the buckets.
        of: the bucket of each group that has one.
        reductions: the reductions that wait for the reductions of neighbours, to share a launch.
    """

    def __init__(self, queue: ReductionQueue) -> None:
        """Start with none. ``queue``: where reductions go."""
        self._queue = queue
        self.gathered: Sequence[FSDPParamGroup] = ()
        self.gathers: list[Bucket] = []
        self.of: dict[FSDPParamGroup, Bucket] = {}
        self.reductions: list[CoalescedReduction] = []

    def learn(self, gathered: Sequence[FSDPParamGroup]) -> None:
        """Divide ``gathered``, the gathers of a forward, into buckets, if it or a group changed."""
        known = gathered == self.gathered and not any(map(_is_void, self.gathers))
        if known or not gathered or CHECKS:
            return
        self.clear()
        self.gathered = list(gathered)
        for groups in _divide(gathered, _gathers_with_others):
            self.gathers.append(Bucket(groups))
            self.of.update(dict.fromkeys(groups, self.gathers[-1]))
        for groups in _divide(gathered, lambda group: not group.joined):
            waiting = CoalescedReduction(len(groups))
            self.reductions.append(waiting)
            for group in groups:
                group.gradients.bucket = waiting

    def launch_waiting(self) -> None:
        """Launch the reductions that wait for their neighbours'."""
        for waiting in self.reductions:
            self._queue.launch(waiting.pop())

    def abandon_waiting(self) -> None:
        """Drop the reductions that wait: their backward raised."""
        for waiting in self.reductions:
            waiting.abandon()

    def clear(self) -> None:
        """Launch reductions that wait, and let each group communicate by itself."""
        self.launch_waiting()
        for group in dict.fromkeys(self.gathered):
            group.gradients.bucket = None
        self.gathers.clear()
        self.of.clear()
        self.reductions.clear()
        self.gathered = ()


def _gathers_with_others(group: FSDPParamGroup) -> bool:
    return group.gathering.coalescing is not None


def _divide(
    gathered: Sequence[FSDPParamGroup], may_share: Callable[[FSDPParamGroup], bool]
) -> Iterator[list[FSDPParamGroup]]:
    """Yield runs of two groups or more that had better share launches, as their gathers do."""
    run: list[FSDPParamGroup] = []
    before: GatherConfig | None = None
    nbytes = 0
    for group in dict.fromkeys(gathered):
        layout, config = group.gathering.layout, group.gathering.config
        if not (may_share(group) and coalescing_pays(layout, config)):
            before = None
            continue
        size = layout.buffer.slice_nbytes * layout.world_size
        full = nbytes + size > group.gather_cap_mb * 2**20
        if before is None or full or not configs_coalesce(config, before):
            if len(run) > 1:
                yield run
            run, nbytes = [], 0
        run.append(group)
        nbytes += size
        before = config
    if len(run) > 1:
        yield run
