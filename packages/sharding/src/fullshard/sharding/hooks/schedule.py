"""The communication schedule: decides when a group gathers, stays unsharded and reduces.

Owns the contract that hooks and the root tell what happens, and its default, ``EagerSchedule``: a
group communicates when its module runs, or with the groups of its bucket. That is right as long as
every rank runs every group, as in torch's ``fully_shard``. Where ranks skip groups,
``StaticSchedule`` follows one order on all ranks. Nobody asks which of the two there is.
"""

from __future__ import annotations

from collections.abc import Callable

from fullshard.sharding.base.leases import LeaseKind
from fullshard.sharding.groups.forward_pass import ForwardPass
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.record import StepRecord

__all__ = ["EagerSchedule", "Schedule"]


class Schedule:
    """When does a group communicate?"""

    def take_over(self, record: StepRecord) -> None:
        """Begins to serve the root whose step ``record`` is."""

    def begin_forward(self) -> None:
        """Begins a root forward."""

    def begin_recompute(self, begin_backward: Callable[[], None]) -> None:
        """Begins a forward inside a backward; may call ``begin_backward``, which begins that."""

    def begin_backward(self) -> None:
        """Begins a backward."""

    def end(self) -> None:
        """Ends the forward or backward; not called for one that raised."""

    def unshard(self, group: FSDPParamGroup) -> None:
        """Issues the gather of ``group``, for which somebody holds a lease, if it needs one."""
        raise NotImplementedError

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Gathers ``group`` ahead, if that may be done now."""
        raise NotImplementedError

    def after_forward(
        self, group: FSDPParamGroup, kept_for: ForwardPass | None, *, keep: bool, unfinished: bool
    ) -> None:
        """Takes the lease under which ``group`` outlives a forward, if any.

        Args:
            group: the group.
            kept_for: the forward whose backward may use it.
            keep: its module keeps it unsharded after forward.
            unfinished: other modules of the same list have yet to run.
        """
        raise NotImplementedError

    def end_pass(self, group: FSDPParamGroup, ended: ForwardPass, *, keep: bool) -> None:
        """Ends the backward of ``ended`` in ``group``, which its module may ``keep`` unsharded."""
        raise NotImplementedError

    def finish_backward(
        self, group: FSDPParamGroup, keeps: Callable[[FSDPParamGroup], bool]
    ) -> None:
        """Ends what backward left open in ``group``; ``keeps``: whether it stays unsharded."""
        raise NotImplementedError


class EagerSchedule(Schedule):
    """Groups communicate as their modules run."""

    def __init__(self) -> None:
        """Serves no root yet."""
        self._record = StepRecord()

    def take_over(self, record: StepRecord) -> None:
        """Notes in ``record`` what it gathers."""
        self._record = record

    def unshard(self, group: FSDPParamGroup) -> None:
        """Gathers it, with those of its bucket if it has one."""
        bucket = group.bucket
        if bucket is not None and bucket.launch(group, ahead=False):
            self._record.gathered += bucket.groups
        elif group.gathering.unshard():
            self._record.gathered.append(group)

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Gathers it, with those of its bucket if it has one."""
        bucket = group.bucket
        if bucket is not None and bucket.launch(group, ahead=True):
            self._record.gathered += bucket.groups
        elif group.prefetch():
            self._record.gathered.append(group)

    def after_forward(
        self, group: FSDPParamGroup, kept_for: ForwardPass | None, *, keep: bool, unfinished: bool
    ) -> None:
        """Keeps it for its backward, for its next use, or for those that have yet to run."""
        if keep and kept_for is not None:
            group.hold_for_graph(kept_for.number)
        elif keep:
            group.keep()
        elif unfinished:
            group.leases.hold(LeaseKind.PREFETCH)

    def end_pass(self, group: FSDPParamGroup, ended: ForwardPass, *, keep: bool) -> None:
        """Reduces it, if it was its last outstanding forward."""
        group.end_pass(ended, keep=keep, reduce=True)

    def finish_backward(
        self, group: FSDPParamGroup, keeps: Callable[[FSDPParamGroup], bool]
    ) -> None:
        """Reduces it, if it was not yet."""
        group.finish_backward(keeps)
