"""The communication schedule and the record of a step that it goes by.

Owns what ran in a step and in which order, and when a group gathers, stays unsharded and reduces:
by default as its module runs, or with the groups of its bucket. This default requires that every
rank runs every group, as in torch's ``fully_shard``, which also records the post-forward order and
prefetches by it; the other orders are ours, because forwards without gradients and recomputations
must find their place in them. Where ranks skip groups, ``StaticSchedule`` follows one order on all
ranks. Callers do not distinguish the two schedules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from fullshard.sharding.base.forward_pass import ForwardPass
from fullshard.sharding.base.states import LeaseKind, ShardedState
from fullshard.sharding.groups.buckets import Bucket
from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = [
    "Order",
    "Schedule",
    "ShardedModule",
    "StepRecord",
    "drop_copies_of_other_steps",
    "keep_copies_within_step",
]

_SHARDED = ShardedState.SHARDED


class ShardedModule(Protocol):
    """The properties of a sharded module that a root uses; see ``ModuleState``."""

    modules: tuple[nn.Module, ...]
    name: str
    groups: list[FSDPParamGroup]
    own_groups: list[FSDPParamGroup]
    unshard_in_backward: bool
    host_ns: int

    def reset(self) -> None:
        """Forget the calls in progress."""


@dataclass(slots=True)
class Order:
    """The modules in the order in which they ran, with multiplicity.

    An entry is known by its place: a number that grows, and stays when others are removed.

    Attributes:
        states: the modules.
        names: their names.
        places: their places, ascending.
    """

    states: list[ShardedModule] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def append(self, state: ShardedModule) -> int:
        """Add ``state`` and return its place."""
        place = self.places[-1] + 1 if self.places else 0
        self.states.append(state)
        self.names.append(state.name)
        self.places.append(place)
        return place

    def remove(self, place: int) -> None:
        """Remove the entry at ``place``, unless it was removed before."""
        position = self._position(place)
        if position >= 0:
            del self.states[position], self.names[position], self.places[position]

    def _position(self, place: int) -> int:
        position = bisect_left(self.places, place)
        found = self.places[position : position + 1] == [place]
        return position if found else -1

    def ahead_of(
        self, place: int, name: str, policy: Callable[[Sequence[str], int], Sequence[int]]
    ) -> list[ShardedModule]:
        """Return the modules that a prefetch policy wants at ``place``, if ``name`` ran there.

        Raises:
            IndexError: if it asks for a position that does not exist.
        """
        count = len(self.names)
        position = self._position(place)
        if position < 0 or self.names[position] != name:
            return []
        wanted = []
        for each in policy(self.names, position):
            if not 0 <= each < count:
                raise IndexError(
                    f"the prefetch policy of {name!r} asked for position {each}; the order has "
                    f"positions 0 to {count - 1}"
                )
            wanted.append(self.states[each])
        return wanted


@dataclass(slots=True)
class StepRecord:
    """The modules that ran under a root, and the groups that were gathered for it.

    Attributes:
        forward: the order of the forward in progress.
        last_forward: that of the forward before it, from which forward prefetches.
        post_forward: the order in which forwards ended since the last backward.
        hidden: per module the places in it that forwards without gradients took.
        used: the groups that any forward has used, in the order in which they first were.
        gathered: the groups gathered since the root's last forward began, in order.
        buckets: the groups that each is gathered with, if it is not by itself; see ``Buckets``.
    """

    forward: Order = field(default_factory=Order)
    last_forward: Order = field(default_factory=Order)
    post_forward: Order = field(default_factory=Order)
    hidden: dict[ShardedModule, list[int]] = field(default_factory=dict)
    used: dict[FSDPParamGroup, None] = field(default_factory=dict)  # an ordered set
    gathered: list[FSDPParamGroup] = field(default_factory=list)
    buckets: Mapping[FSDPParamGroup, Bucket] = field(default_factory=dict)

    def begin_forward(self) -> None:
        """Begin the order of a root forward; the one before it stays to prefetch by."""
        self.last_forward, self.forward = self.forward, Order()
        self.gathered = []

    def drop_post_forward(self) -> None:
        """Forget in which order forwards ended."""
        self.post_forward, self.hidden = Order(), {}

    def place(self, state: ShardedModule, kept_for: ForwardPass | None, before: int) -> int:
        """Give a forward of ``state`` that ended its place in the post-forward order.

        Args:
            state: the module; of a list, one of its modules ended.
            kept_for: the forward that a backward may follow, if this is one.
            before: the place that the same pass over a list of modules had so far, or -1.

        Returns:
            The place.
        """
        self.post_forward.remove(before)
        hidden = self.hidden.get(state)
        if hidden and hidden[-1] == before:
            hidden.pop()
        place = self.post_forward.append(state)
        if kept_for is not None:
            kept_for.place = place
        else:
            self.hidden.setdefault(state, []).append(place)
        return place

    def place_again(self, state: ShardedModule, rerun: ForwardPass | None) -> None:
        """Give a recomputation the place of the forward that it repeats.

        Reentrant checkpointing runs the forward without gradients and reruns it in backward with
        them.
        """
        if rerun is not None and self.hidden.get(state):
            rerun.place = self.hidden[state].pop()


class Schedule:
    """When does a group communicate? Here as its module runs.

    Attributes:
        keeps: whether a group may stay unsharded after a backward.
        before_reduction: called before a group reduces as its backward ends; ``early_gradients``
            sets it.
    """

    keeps = True

    def __init__(self) -> None:
        """Initialise without a root."""
        self.before_reduction: Callable[[], None] = _nothing
        self._record = StepRecord()

    def take_over(self, record: StepRecord) -> None:
        """Use the root whose step is ``record``, and add gathered groups to this record."""
        self._record = record

    def begin(self, *, backward: bool) -> None:
        """Begin a root forward, or a backward."""

    def begin_recompute(self, begin_backward: Callable[[], None]) -> None:
        """Begin a forward inside a backward; may call ``begin_backward`` to begin the backward."""

    def end(self) -> None:
        """End the forward or backward; not called for one that raised."""

    def unshard(self, group: FSDPParamGroup) -> None:
        """Gather ``group``, which must have a lease, with its bucket if it has one."""
        record, gathering = self._record, group.gathering
        bucket = record.buckets.get(group) if gathering.state is _SHARDED else None
        if bucket is not None and bucket.launch(group, ahead=False):
            record.gathered += bucket.groups
        elif gathering.unshard():
            record.gathered.append(group)

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Gather ``group`` ahead, if that may be done now, with its bucket if it has one."""
        record = self._record
        bucket = record.buckets.get(group) if group.gathering.state is _SHARDED else None
        if bucket is not None and bucket.launch(group, ahead=True):
            record.gathered += bucket.groups
        elif group.prefetch():
            record.gathered.append(group)

    def after_forward(
        self, group: FSDPParamGroup, kept_for: ForwardPass | None, *, keep: bool, unfinished: bool
    ) -> None:
        """Take the lease under which ``group`` outlives a forward, if any.

        Args:
            group: the group.
            kept_for: the forward whose backward may use it.
            keep: its module keeps it unsharded after forward.
            unfinished: other modules of the same list have yet to run.
        """
        if keep and kept_for is not None:
            group.hold_for_graph(kept_for.number)
        elif keep:
            group.keep()
        elif unfinished:
            group.leases.hold(LeaseKind.PREFETCH)

    def end_pass(self, group: FSDPParamGroup, ended: ForwardPass) -> None:
        """End the backward of ``ended`` in ``group``; reduce if it was the last outstanding."""
        self.before_reduction()
        last, gradients = group.end_pass(ended), group.gradients
        gradients.grads_after_reduce |= gradients.reduced and not last
        ready = group.pop_ready(ended.number, reduce=last, keep=group.keeps)
        group.shared.queue.launch(ready)

    def finish_backward(self, group: FSDPParamGroup, *, is_last: bool) -> str:
        """End all that backward left open in ``group``, and reduce it.

        ``is_last``: no other backward follows before the optimizer steps. Returns an error message;
        see ``GroupGradients.end_of_backward``.
        """
        keep, keep_ahead = self.keeps and group.keeps, self.keeps and not is_last
        ready = group.finish_backward(keep=keep, keep_ahead=keep_ahead)
        group.shared.queue.launch(ready)
        return group.gradients.end_of_backward()


def _nothing() -> None:
    """Do nothing before a reduction."""


# -- copies that placements keep ------------------------------------------------------------------


def drop_copies_of_other_steps(groups: Sequence[FSDPParamGroup]) -> None:
    """Drop what ``groups`` kept outside the backwards of one step, before a forward uses it.

    [Note: kept copies] The backward of a forward uses the copy that the forward kept. So do
    forwards between the backwards of one step. Between steps no copy is used again, also if no
    optimizer was seen to step: a user may change parameters by hand, as moving averages and loops
    without an optimizer do, and the counters of tensors do not show every such change.
    """
    for group in groups:
        if group.gathering.keeps_copies and not group.gathering.within_step:
            group.gathering.drop_copies()


def keep_copies_within_step(groups: Sequence[FSDPParamGroup], *, is_last: bool) -> None:
    """Keep copies after a backward if another one follows in the step; see [Note: kept copies].

    Another one follows if ``is_last`` is not set, or where the user turned synchronisation off.
    """
    for group in groups:
        gathering = group.gathering
        if gathering.keeps_copies:
            gathering.within_step = not (is_last and group.gradients.accumulation.synchronises)
            if not gathering.within_step:
                gathering.drop_copies()
