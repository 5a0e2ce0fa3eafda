"""The schedule in which small groups share launches, where a launch costs more than its bytes.

Owns the division of groups into buckets, by the order in which they were gathered before.

[Note: learning order] After each forward of the root the groups that it gathered are known, in
order; those that follow one another, and are small enough for that to pay, make a bucket. The
modules that ran may differ between ranks; the gathers may not differ, so all ranks make equal
buckets. While there are ``CHECKS`` of collectives, no group is in a bucket: ranks then compare
their gathers group by group, so that an error names the group in which they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fullshard.comm import GatherConfig
from fullshard.comm.spi import CHECKS
from fullshard.policies.schedules.buckets import Bucket, own_way
from fullshard.policies.schedules.reductions import CoalescedReduction
from fullshard.policies.schedules.sizes import alike, default_cap, pays
from fullshard.sharding import FSDPParamGroup, Schedule, ShardedState
from fullshard.sharding.spi import ReadyReductions, ReductionQueue, require_cap

__all__ = ["CoalescedSchedule"]


class CoalescedSchedule(Schedule):
    """Groups communicate as their modules run; small ones that follow one another share launches.

    Where ``fullshard.policies`` is installed, roots have this schedule. Launches are shared only
    between CPU ranks that share no memory: consecutive groups of up to 64 KiB in each rank's slice
    are gathered together, and reduced together, from the second forward on. Results are equal to
    the last bit. ``model.set_schedule(fullshard.sharding.Schedule())`` gives each group launches of
    its own.
    """

    def __init__(
        self, *, gather_cap_mb: float | None = None, reduce_cap_mb: float | None = None
    ) -> None:
        """Wait for a root.

        Args:
            gather_cap_mb: MiB of full parameters with their padding that one launch gathers at
                most, and that may be unsharded ahead of use; None: half a MiB of each rank's
                slices, 25 in all.
            reduce_cap_mb: the same of gradients.

        Raises:
            TypeError: if one is no number.
            ValueError: if one is negative or not finite.
        """
        super().__init__()
        for name, cap in (("gather_cap_mb", gather_cap_mb), ("reduce_cap_mb", reduce_cap_mb)):
            if cap is not None:
                require_cap(name, cap)
        self._gather_cap, self._reduce_cap = gather_cap_mb, reduce_cap_mb
        self._gathered: list[FSDPParamGroup] = []  # since the root's last forward began, in order
        self._learnt_from: list[FSDPParamGroup] = []
        self.buckets: dict[FSDPParamGroup, Bucket] = {}
        self._reductions: dict[FSDPParamGroup, CoalescedReduction] = {}

    def __repr__(self) -> str:
        """Return how it was made."""
        caps = f"gather_cap_mb={self._gather_cap}, reduce_cap_mb={self._reduce_cap}"
        return f"{type(self).__name__}({caps})"

    def begin(self, *, backward: bool) -> None:
        """Forget what was learnt while collectives are checked, or where a group changed."""
        super().begin(backward=backward)
        if not backward:
            self._gathered = []
            if self.buckets and (CHECKS or any(each.void for each in self._all_buckets())):
                self._forget()

    def end(self, *, backward: bool) -> None:
        """Divide the groups that a forward gathered into buckets, if they are others."""
        super().end(backward=backward)
        gathered = self._gathered
        if backward or CHECKS or not gathered:
            return
        if gathered == self._learnt_from and not any(each.void for each in self._all_buckets()):
            return
        self._forget()
        self._learnt_from = list(gathered)
        for groups in self._divide(self._gather_cap, lambda group: own_way(group) is not None):
            self.buckets.update(dict.fromkeys(groups, Bucket(groups)))
        for groups in self._divide(self._gather_cap, lambda group: len(group.roots) == 1):
            cap = _cap_of(self._reduce_cap, groups[0])
            self._reductions.update(dict.fromkeys(groups, CoalescedReduction(len(groups), cap)))

    def unshard(self, group: FSDPParamGroup) -> None:
        """Gather ``group``, with its bucket if it has one."""
        bucket, gathers = self._bucket_of(group), group.gathering.gathers
        if bucket is not None and bucket.launch(group, ahead=False):
            self._gathered += bucket.groups
            return
        group.gathering.launch_gather()
        if group.gathering.gathers > gathers:
            self._gathered.append(group)

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Gather ``group`` ahead, if that may be done now, with its bucket if it has one."""
        bucket, gathers = self._bucket_of(group), group.gathering.gathers
        if bucket is not None and bucket.launch(group, ahead=True):
            self._gathered += bucket.groups
            return
        super().prefetch(group)
        if group.gathering.gathers > gathers:
            self._gathered.append(group)

    def due(self, group: FSDPParamGroup, ready: ReadyReductions) -> ReadyReductions:
        """Let reductions of ``group`` wait for those of its neighbours; return those to launch."""
        waiting = self._reductions.get(group)
        return ready if waiting is None else waiting.put(ready)

    def flush(self) -> None:
        """Launch the reductions that wait."""
        for group, waiting in self._reductions.items():
            group.shared.queue.launch(waiting.pop())

    def discard(self, queue: ReductionQueue) -> None:
        """Drop the reductions that wait, too."""
        for waiting in self._reductions.values():
            waiting.abandon()
        super().discard(queue)

    def leave(self) -> None:
        """Let each group communicate by itself."""
        self._forget()

    def _all_buckets(self) -> Sequence[Bucket]:
        return list(dict.fromkeys(self.buckets.values()))

    def _bucket_of(self, group: FSDPParamGroup) -> Bucket | None:
        is_sharded = group.gathering.state is ShardedState.SHARDED
        return self.buckets.get(group) if is_sharded else None

    def _forget(self) -> None:
        self.flush()
        self.buckets.clear()
        self._reductions.clear()
        self._learnt_from = []

    def _divide(
        self, cap_mb: float | None, may_share: Callable[[FSDPParamGroup], bool]
    ) -> Iterator[list[FSDPParamGroup]]:
        """Yield runs of two groups or more that had better share launches, as their gathers do."""
        run: list[FSDPParamGroup] = []
        before: GatherConfig | None = None
        nbytes = 0
        for group in dict.fromkeys(self._learnt_from):
            layout, config = group.gathering.layout, group.gathering.config
            if not (may_share(group) and pays(layout, config)):
                before = None
                continue
            size = layout.buffer.slice_nbytes * layout.world_size
            full = nbytes + size > _cap_of(cap_mb, group)
            if before is None or full or not alike(config, before):
                if len(run) > 1:
                    yield run
                run, nbytes = [], 0
            run.append(group)
            nbytes += size
            before = config
        if len(run) > 1:
            yield run


def _cap_of(cap_mb: float | None, group: FSDPParamGroup) -> float:
    """Return the bytes that one launch moves at most."""
    return default_cap(group.gathering.layout.world_size) if cap_mb is None else cap_mb * 2**20
