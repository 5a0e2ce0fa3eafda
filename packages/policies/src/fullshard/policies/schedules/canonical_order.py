"""The canonical order: one order of gathers and reductions that all ranks follow.

Owns the order and the place in it; it gathers ahead, drops and reduces groups whose turn comes. The
reason why a rank does not run a group does not matter here.

[Note: canonical order] In forward each group is gathered exactly once, in the order in which
modules are defined, parents first. In backward each group is gathered once and reduced once:
gathers in the reverse of the order in which modules end their forward, a reduction ``slack``
gathers after the place where its module's backward ends. A rank that needs a group first issues
everything before it in that order: gathers whose result it drops, reductions to which it adds
zeros. At the end of forward and of backward it issues the rest. No group stays unsharded from
forward to backward or to the next forward, because a remaining copy would depend on what the rank
ran. DeepSpeed's ZeRO-3 traces an order too, but only to prefetch by it: there, as in torch, ranks
that skip a module wait for ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from fullshard.sharding import FSDPParamGroup, LeaseKind, Schedule, ShardedState
from fullshard.sharding.spi import (
    BackwardStage,
    ForwardPass,
    ReductionQueue,
    ShardedModule,
    StepRecord,
    require_count,
    state_of,
)

__all__ = ["CanonicalOrder", "Event", "Step", "backward_steps", "events_under", "forward_steps"]

_IN_FLIGHT = 2  # gathers whose results this rank does not use


@dataclass(frozen=True)
class Event:
    """A module begins its forward, or ends it."""

    state: ShardedModule
    ends: bool = False


_LEFT = (LeaseKind.KEPT, LeaseKind.GRAPH, LeaseKind.PREFETCH, LeaseKind.BACKWARD)
"""What an earlier pass may hold, with the backward that ``finalize_backward`` is to finish."""


@dataclass(frozen=True)
class Step:
    """An entry of the order.

    Attributes:
        group: which group is to communicate.
        reduces: whether it is to reduce; else to gather.
    """

    group: FSDPParamGroup
    reduces: bool = False


class CanonicalOrder(Schedule):
    """Lets ranks skip whole groups: gathers and reductions follow one order on all ranks.

    Pass one to ``set_schedule()`` of the root, on all ranks alike. A rank whose forward or backward
    does not run a module then still takes part in its collectives, with zeros where it has no
    gradient. Every rank must run the root's forward, and a backward where any does. The order is
    that in which the modules are defined; nothing stays unsharded between forward and backward.
    After an error, ``reset_iter_state()`` takes part in the rest of the pass, as other ranks do.
    """

    allows_kept_groups = False

    def __init__(self, *, slack: int = 1) -> None:
        """Wait for a root.

        Args:
            slack: a group is reduced after this many later gathers: how far backward may depart
                from the order. At least the number of sharded modules in one checkpointed region.

        Raises:
            TypeError: if ``slack`` is not an int.
            ValueError: if it is less than 1.
        """
        require_count("slack", slack)
        super().__init__()
        self._slack = slack
        self._states: Sequence[ShardedModule] = ()
        self._forward: Sequence[Step] = ()
        self._backward: Sequence[Step] = ()
        self._repeated: set[FSDPParamGroup] = set()
        self._groups: tuple[FSDPParamGroup, ...] = ()
        self._without_gather: set[FSDPParamGroup] = set()
        self._steps: Sequence[Step] = ()
        self._position: dict[Step, int] = {}
        self._next = 0
        self._synced: Sequence[tuple[bool, bool]] = ()  # by group, as this backward began
        self._ahead: deque[FSDPParamGroup] = deque()  # gathered, and not asked for

    def __repr__(self) -> str:
        """Return how it was made."""
        return f"{type(self).__name__}(slack={self._slack})"

    def take_over(
        self, states: Sequence[ShardedModule], record: StepRecord, queue: ReductionQueue
    ) -> None:
        """Find the order, and mark all groups as used: skipped ones end their backward, too."""
        super().take_over(states, record, queue)
        events = list(events_under(states[0].modules, state_of))
        self._states = [event.state for event in events if event.ends]
        self._forward = forward_steps(events)
        self._backward = backward_steps(events, self._slack)
        uses = Counter(group for state in self._states for group in state.groups)
        self._repeated = {group for group, count in uses.items() if count > 1}
        self._groups = tuple(uses)
        record.used_groups = dict.fromkeys(self._groups)

    # -- phases -----------------------------------------------------------------------------------

    def begin(self, *, backward: bool) -> None:
        """Start at the first group; in forward, free groups that an earlier pass left unsharded."""
        self._end_raised()
        for group in () if backward else self._groups:
            group.drop_leases(*_LEFT)
            group.adopt_replaced()  # also on a rank that will skip it
        self._without_gather = {
            group
            for state in self._states
            if backward and not state.unshard_in_backward
            for group in state.own_groups
        }
        self._synced = [group.gradients.synced for group in self._groups]
        self._steps = self._backward if backward else self._forward
        self._position = {step: index for index, step in enumerate(self._steps)}
        self._next = 0
        self._ahead.clear()

    def _end_raised(self) -> None:
        """End a pass that raised; reductions of earlier backwards stay."""
        if self._next < len(self._steps):
            queue = self._groups[0].shared.queue
            queue.commit_sealed()
            self.discard(queue)
            for group in self._groups:
                group.gradients.abandon()  # no backward of these reductions has begun

    def discard(self, queue: ReductionQueue) -> None:
        """Discard reductions once the pass is complete: ranks may have come to other places in it.

        What is left of a backward is reduced by the settings with which it began.
        """
        if self._next < len(self._steps):
            with ExitStack() as stack:
                for group, synced in zip(self._groups, self._synced, strict=True):
                    stack.enter_context(group.gradients.synced_as(synced))
                self._advance(len(self._steps))
            for group in self._groups:
                group.drop_leases(*_LEFT)
        queue.launch_second()
        queue.discard()

    def begin_recompute(self, begin_backward: Callable[[], None]) -> None:
        """Start at the first group of backward, before its first gather."""
        begin_backward()

    def end(self, *, backward: bool) -> None:
        """Issue the steps that this rank did not run; end USER leases as well."""
        self._advance(len(self._steps))
        self._drop(0)
        for group in self._groups:
            group.drop_leases(LeaseKind.USER)

    # -- groups -----------------------------------------------------------------------------------

    def unshard(self, group: FSDPParamGroup) -> None:
        """Issue all steps before the gather of ``group``, and this gather.

        Raises:
            RuntimeError: if its turn is over and it is not there.
        """
        index = self._position[Step(group)]
        if self._steps is self._backward:
            group.leases.add_once(LeaseKind.PREFETCH)  # until it is reduced
        if group in self._ahead:
            self._drop(len(self._ahead) - self._ahead.index(group))
            self._ahead.remove(group)
        elif index >= self._next:
            self._advance(index)
            self._next = index + 1
        elif group.state not in (ShardedState.UNSHARDING, ShardedState.UNSHARDED):
            raise RuntimeError(
                f"the turn of {group.name!r} in the canonical order is over, which has come to "
                f"{self._steps[self._next - 1].group.name!r}. Define modules in the order in which "
                "they run; on a module that runs several times in one forward call "
                "set_reshard_after_forward(False); if a checkpointed region holds several sharded "
                "modules, raise slack to their number; run a backward for each forward of the root"
            )
        group.gathering.launch_gather()

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Gather all groups up to ``group``, unless a reduction comes first."""
        wanted = self._position.get(Step(group), -1)
        while self._next <= wanted and not self._steps[self._next].reduces:
            self._gather_ahead(self._steps[self._next].group)
            self._next += 1

    def keep_after_forward(
        self, group: FSDPParamGroup, kept_for: ForwardPass | None, *, keep: bool, unfinished: bool
    ) -> None:
        """Keep it to the end of the root's forward, as it is gathered only once."""
        if keep or unfinished or group in self._repeated:
            group.leases.add_once(LeaseKind.PREFETCH)

    def end_module_backward(self, group: FSDPParamGroup, forward_pass: ForwardPass) -> None:
        """Issue all steps up to the reduction of ``group``, if its last outstanding forward ended.

        The reduction of a group of several modules waits for its turn: a forward that a checkpoint
        has yet to compute again is not outstanding.
        """
        last = group.note_pass_ended(forward_pass)
        group.gradients.pop_ready(reduce=False)  # they wait for the group's turn
        group.release_backward(forward_pass.number, keep=False)
        if last and group not in self._repeated:
            self._advance(self._position[Step(group, reduces=True)] + 1)

    def end_backward(self, group: FSDPParamGroup, *, is_last: bool) -> None:
        """End all that backward left open; nothing is kept.

        All ranks reduce what no rank has reduced yet: what ``finalize_backward`` is to reduce.
        """
        if not group.gradients.reduced:
            _launch_reductions(group)
        if group.gradients.reduced:  # a second turn would be this rank's own
            group.gradients.stage = BackwardStage.REDUCED
        super().end_backward(group, is_last=is_last)

    def _advance(self, end: int) -> None:
        while self._next < end:
            step = self._steps[self._next]
            self._next += 1
            if step.reduces:
                self._reduce(step.group)
            else:
                self._drop(_IN_FLIGHT - 1)
                self._gather_ahead(step.group)

    def _gather_ahead(self, group: FSDPParamGroup) -> None:
        if group not in self._without_gather:
            group.prefetch()
            self._ahead.append(group)

    def _reduce(self, group: FSDPParamGroup) -> None:
        if group in self._ahead:
            self._ahead.remove(group)
        group.drop_leases(LeaseKind.PREFETCH)
        _launch_reductions(group)

    def _drop(self, most: int) -> None:
        """Free gathered groups that were passed over, except the newest ``most``.

        In backward a group passed over may yet be asked for, until it is reduced; in forward one
        that several modules use, until the end.
        """
        while self._steps is self._forward and len(self._ahead) > most:
            group = self._ahead.popleft()
            if group not in self._repeated:
                group.drop_leases(LeaseKind.PREFETCH)


def _launch_reductions(group: FSDPParamGroup) -> None:
    """Launch the reductions of all gradients of ``group``, or of zeros where there are none."""
    group.gathering.setup.prepare()  # if no gather did since its parameters were replaced
    group.shared.queue.launch(group.gradients.pop_ready(reduce=True))


def events_under(
    modules: Sequence[nn.Module], state_of: Callable[[nn.Module], ShardedModule | None]
) -> Iterator[Event]:
    """Yield when each sharded module in ``modules`` begins and ends its forward.

    As if every module ran its children in the order of their definition. A list of modules begins
    with its first and ends with its last; ``state_of`` maps a module to its sharded module.
    """
    ended: Counter[ShardedModule] = Counter()
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> Iterator[Event]:
        if module in seen:
            return
        seen.add(module)
        state = state_of(module)
        if state is not None and state not in ended:
            ended[state] = 0
            yield Event(state)
        for child in module.children():
            yield from walk(child)
        if state is not None:
            ended[state] += 1
            if ended[state] == len(state.modules):
                yield Event(state, ends=True)

    for module in modules:
        yield from walk(module)


def forward_steps(events: Sequence[Event]) -> list[Step]:
    """Return the gathers of a forward: each group where its first module begins."""
    begun = (event.state for event in events if not event.ends)
    return list(dict.fromkeys(Step(group) for state in begun for group in state.groups))


def backward_steps(events: Sequence[Event], slack: int) -> list[Step]:
    """Return the gathers and reductions of a backward.

    Each group is gathered where the backward of its last module begins, and reduced ``slack``
    gathers after the backward of its first module ended.
    """
    first: dict[FSDPParamGroup, Event] = {}
    for event in events:
        for group in event.state.groups if not event.ends else ():
            first.setdefault(group, event)
    steps: dict[Step, None] = {}
    gathered = 0
    waiting: deque[tuple[int, Step]] = deque()
    for event in reversed(events):
        for group in reversed(event.state.groups):
            if event.ends and Step(group) not in steps:
                steps[Step(group)] = None
                gathered += 1
                while waiting and waiting[0][0] <= gathered:
                    steps[waiting.popleft()[1]] = None
            elif first[group] is event:
                waiting.append((gathered + slack, Step(group, reduces=True)))
    return [*steps, *(step for _, step in waiting)]
