"""Which small groups share their launches, learnt from the order in which they were gathered.

Owns the division of groups into buckets. [Note: learning order] After each forward of the root the
groups that it gathered are known, in order; those that follow one another, and are small enough
for that to pay, make a bucket. What a forward ran may differ between ranks; what it gathered may
not, so all ranks make the same buckets. In debug mode there are none: what each rank gathers is
compared group by group, so that the group is named in which they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from fullshard.comm import GatherConfig, Layout
from fullshard.comm.collectives.coalescing import coalescing_pays, configs_coalesce
from fullshard.comm.debug.debug import is_debugging
from fullshard.sharding.gather.coalesced import CoalescedGather
from fullshard.sharding.reduce.coalesced import CoalescedReduction
from fullshard.sharding.reduce.reduction import ReductionQueue

if TYPE_CHECKING:
    from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = ["Buckets"]

Groups = tuple["FSDPParamGroup", ...]
Launch = tuple[Layout, GatherConfig]


class Buckets:
    """The buckets of one root."""

    def __init__(self, queue: ReductionQueue) -> None:
        """Starts with none. ``queue``: where reductions go."""
        self._queue = queue
        self._gathered: Sequence[FSDPParamGroup] = ()
        self._gathers: dict[Groups, CoalescedGather[FSDPParamGroup]] = {}
        self._reductions: dict[Groups, CoalescedReduction] = {}

    def learn(self, gathered: Sequence[FSDPParamGroup]) -> None:
        """Divides ``gathered`` into buckets, if a forward gathered otherwise before.

        A forward that gathered nothing teaches nothing.
        """
        if is_debugging():
            return
        void = any(bucket.void for bucket in self._gathers.values())
        if not gathered or (gathered == self._gathered and not void):
            return
        gathers, reductions = self._gathers, self._reductions
        self.clear()
        self._gathered = list(gathered)
        for groups in _divide(gathered, _gather_of):
            bucket = gathers.get(groups)
            if bucket is None or bucket.void:
                bucket = CoalescedGather(groups)
            self._gathers[groups] = bucket
            for group in groups:
                group.bucket = bucket
        for groups in _divide(gathered, _launch_of):
            kept = reductions.get(groups)
            waiting = CoalescedReduction(len(groups), self._queue)
            self._reductions[groups] = waiting if kept is None else kept
            for group in groups:
                group.gradients.bucket = self._reductions[groups]

    def flush(self) -> None:
        """Launches the reductions that wait: backward is over."""
        for bucket in self._reductions.values():
            bucket.flush()

    def abandon(self) -> None:
        """Forgets the reductions that wait: backward raised."""
        for bucket in self._reductions.values():
            bucket.abandon()

    def clear(self) -> None:
        """Lets each group communicate by itself, until it learns anew."""
        for group in dict.fromkeys(self._gathered):
            group.bucket = group.gradients.bucket = None
        self._gathers, self._reductions, self._gathered = {}, {}, ()


def _gather_of(group: FSDPParamGroup) -> Launch | None:
    return None if group.gathering.coalescing is None else _launch_of(group)


def _launch_of(group: FSDPParamGroup) -> Launch | None:
    """Returns what a launch of ``group`` moves, also where its gathers are no one else's."""
    return group.gathering.layout, group.gathering.config


def _divide(
    gathered: Sequence[FSDPParamGroup], launch_of: Callable[[FSDPParamGroup], Launch | None]
) -> Iterator[Groups]:
    """Yields runs of two groups or more that had better share launches."""
    run: list[FSDPParamGroup] = []
    config: GatherConfig | None = None
    nbytes = 0
    for group in dict.fromkeys(gathered):
        launch = launch_of(group)
        small = launch is not None and coalescing_pays(*launch)
        size = 0 if launch is None else _nbytes(launch[0])
        full = nbytes + size > group.gather_cap_mb * 2**20
        other = launch is None or config is None or not configs_coalesce(launch[1], config)
        if not small or full or other:
            if len(run) > 1:
                yield tuple(run)
            run, nbytes = [], 0
        if launch is not None and small:
            run.append(group)
            nbytes += size
            config = launch[1]
    if len(run) > 1:
        yield tuple(run)


def _nbytes(layout: Layout) -> int:
    return layout.buffer.slice_nbytes * layout.world_size
