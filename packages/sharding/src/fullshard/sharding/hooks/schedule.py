"""The communication schedule and the record of a step that it goes by.

Owns what ran in a step and in which order, and when a group gathers, stays unsharded and reduces:
by default as its module runs. This default requires that every rank runs every group, as in torch's
``fully_shard``, which also records the post-forward order and prefetches by it; the other orders
are ours, because forwards without gradients and recomputations must find their place in them.
``set_schedule`` takes another schedule, a subclass of ``Schedule``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from fullshard.sharding.base.forward_pass import ForwardPass
from fullshard.sharding.base.states import BackwardStage, LeaseKind
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.reduce.reduction import ReductionQueue
from fullshard.sharding.reduce.strategies import ReadyReductions

__all__ = [
    "Order",
    "Schedule",
    "ShardedModule",
    "StepRecord",
    "keep_copies_within_step",
]


class ShardedModule(Protocol):
    """The properties of a sharded module that a root uses; see ``ModuleState``."""

    modules: tuple[nn.Module, ...]
    name: str
    groups: list[FSDPParamGroup]
    own_groups: list[FSDPParamGroup]
    host_ns: int

    @property
    def unshard_in_backward(self) -> bool:
        """Whether backward needs full parameters."""

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
        if place in self.places:
            position = self.places.index(place)
            del self.states[position], self.names[position], self.places[position]

    def ahead_of(
        self, place: int, name: str, policy: Callable[[Sequence[str], int], Sequence[int]]
    ) -> list[ShardedModule]:
        """Return the modules that a prefetch policy wants at ``place``, if ``name`` ran there.

        Raises:
            IndexError: if it asks for a position that does not exist.
        """
        count, position = len(self.names), bisect_left(self.places, place)
        if self.places[position : position + 1] != [place] or self.names[position] != name:
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
    """The modules that ran under a root, and the groups that they used.

    Attributes:
        forward: the order of the forward in progress.
        last_forward: that of the forward before it, from which forward prefetches.
        post_forward: the order in which forwards ended since the last backward.
        no_grad_places: per module the places in it that forwards without gradients took.
        used_groups: the groups that any forward has used, in the order in which they first were.
    """

    forward: Order = field(default_factory=Order)
    last_forward: Order = field(default_factory=Order)
    post_forward: Order = field(default_factory=Order)
    no_grad_places: dict[ShardedModule, list[int]] = field(default_factory=dict)
    used_groups: dict[FSDPParamGroup, None] = field(default_factory=dict)  # an ordered set

    def drop_post_forward(self) -> None:
        """Forget in which order forwards ended."""
        self.post_forward, self.no_grad_places = Order(), {}

    def place(self, state: ShardedModule, kept_for: ForwardPass | None, before: int) -> int:
        """Give a forward of ``state`` that ended its place in the post-forward order.

        Args:
            state: the module; of a list, one of its modules ended.
            kept_for: the forward that a backward may follow, if this is one.
            before: the place that the same pass over a list of modules had so far, or -1.

        Returns:
            The place.
        """
        if before >= 0:
            self.post_forward.remove(before)
        no_grad_places = self.no_grad_places.get(state)
        if no_grad_places and no_grad_places[-1] == before:
            no_grad_places.pop()
        place = self.post_forward.append(state)
        if kept_for is not None:
            kept_for.place = place
        else:
            self.no_grad_places.setdefault(state, []).append(place)
        return place

    def place_again(self, state: ShardedModule, rerun: ForwardPass | None) -> None:
        """Give a recomputation the place of the forward that it repeats.

        Reentrant checkpointing runs the forward without gradients and reruns it in backward with
        them.
        """
        if rerun is not None and self.no_grad_places.get(state):
            rerun.place = self.no_grad_places[state].pop()


class Schedule:
    """When does a group communicate? Here as its module runs.

    A schedule belongs to one root. All ranks must make the same decisions. A decision may depend on
    the modules that ran only if all ranks run the same modules.

    Attributes:
        allows_kept_groups: whether a group may stay unsharded after a backward.
        before_reduction: called before a group reduces as its backward ends, if it is set.
    """

    allows_kept_groups = True

    def __init__(self) -> None:
        """Initialise without a root."""
        self.before_reduction: Callable[[], None] | None = None
        self._record: StepRecord | None = None

    def __repr__(self) -> str:
        """Return what ranks compare before they communicate: its class, and what it was made of."""
        return f"{type(self).__name__}()"

    def take_over(
        self, states: Sequence[ShardedModule], record: StepRecord, queue: ReductionQueue
    ) -> None:
        """Act for a root.

        Args:
            states: the sharded modules under it, itself first; none if they are not known yet.
            record: what runs.
            queue: its reductions.

        Raises:
            ValueError: if another root has this schedule.
        """
        if self._record is not None and self._record is not record:
            raise ValueError(f"another root has this {type(self).__name__}; make one for each root")
        self._record = record

    def begin(self, *, backward: bool) -> None:
        """Begin a root forward, or a backward; end one that raised: ranks are at one place then."""

    def discard(self, queue: ReductionQueue) -> None:
        """Discard the reductions of a backward that raised, before its groups are reset."""
        queue.discard()

    def begin_recompute(self, begin_backward: Callable[[], None]) -> None:
        """Begin a forward inside a backward; may call ``begin_backward`` to begin the backward."""

    def end(self, *, backward: bool) -> None:
        """End a root forward, or a backward; not called for one that raised."""

    def unshard(self, group: FSDPParamGroup) -> None:
        """Gather ``group``, which must have a lease."""
        group.gathering.launch_gather()

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Gather ``group`` ahead, if that may be done now."""
        group.prefetch()

    def keep_after_forward(
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
            group.leases.add_once(LeaseKind.PREFETCH)

    def due(self, group: FSDPParamGroup, ready: ReadyReductions) -> ReadyReductions:
        """Return what to launch, now that ``ready`` of ``group`` may be; the rest is held back."""
        return ready

    def flush(self) -> None:
        """Launch reductions that ``due`` held back: all backwards of the root are over."""

    def leave(self) -> None:
        """Act no longer for a root: another schedule does from now on."""

    def end_module_backward(self, group: FSDPParamGroup, forward_pass: ForwardPass) -> None:
        """End a backward in ``group``, and reduce if it was the last outstanding one."""
        if self.before_reduction is not None:
            self.before_reduction()
        last, gradients = group.note_pass_ended(forward_pass), group.gradients
        if gradients.stage is BackwardStage.REDUCED and not last:
            gradients.reach()
        ready = gradients.pop_ready(reduce=last)
        group.release_backward(forward_pass.number, keep=group.full_after_backward)
        group.shared.queue.launch(self.due(group, ready))

    def end_backward(self, group: FSDPParamGroup, *, is_last: bool) -> None:
        """End all that backward left open in ``group``, and reduce it.

        ``GroupGradients.end_backward`` follows. ``is_last``: no other backward follows before
        the optimizer steps.
        """
        allowed = self.allows_kept_groups
        ready = group.end_backward(
            keep=allowed and group.full_after_backward, keep_ahead=allowed and not is_last
        )
        group.shared.queue.launch(self.due(group, ready))


SCHEDULES: list[Callable[[], Schedule]] = [Schedule]
"""Schedules of new roots, of which the last is used; packages append to it when imported."""


# -- copies that placements keep ------------------------------------------------------------------


def keep_copies_within_step(groups: Sequence[FSDPParamGroup], *, is_last: bool) -> None:
    """Keep copies after a backward if another one follows in the step.

    Another one follows if ``is_last`` is not set, or where the user turned synchronisation off.

    [Note: kept copies] The backward of a forward uses the copy that the forward kept.
    Forwards between the backwards of one step use the copy, too. Between steps all copies are
    dropped, also without an optimizer's step: a user may change parameters by hand, and the
    counters of tensors do not show every change.
    """
    for group in groups:
        gathering = group.gathering
        if gathering.keeps_copies:
            gathering.within_step = not (is_last and group.gradients.synchronises)
            if not gathering.within_step:
                gathering.drop_copies()
