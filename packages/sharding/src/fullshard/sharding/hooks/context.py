"""The state of all groups under one root: streams, the record of a step, the present backward.

Owns the beginning and the end of the root's forward and of a backward. Decides nothing about a
single group: the module informs a group about the end of a phase.

[Note: autocast] ``torch.autocast`` casts a weight once in a region, and later forwards use the same
cast. In the backward of a later forward, autograd runs the node of that cast last: after the
reduction. Therefore the cache of casts is cleared when a root's forward or a recomputation begins,
and when a forward without a backward ends.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import torch

from fullshard.comm import CommStreams, EventKind
from fullshard.comm.spi import (
    IDLE,
    NOTHING,
    TIMELINES,
    Mark,
    emit,
    is_profiled,
    mark,
)
from fullshard.sharding.base.compat import current_graph_task, functorch_is_active, untraced
from fullshard.sharding.base.states import BackwardEnd, LeaseKind
from fullshard.sharding.extension import ROOT_EXTENSIONS, end_pass
from fullshard.sharding.groups.param_group import FSDPParamGroup
from fullshard.sharding.hooks.compat import (
    calling_frame,
    is_running,
    queue_end_of_backward,
    refuse_compiled_autograd,
    refuse_split_backward,
)
from fullshard.sharding.hooks.schedule import (
    SCHEDULES,
    Order,
    Schedule,
    ShardedModule,
    StepRecord,
    keep_copies_within_step,
)
from fullshard.sharding.hooks.transforms import set_apart
from fullshard.sharding.reduce.reduction import RootComm

__all__ = ["RootContext"]


class RootContext:
    """The state of one root.

    Attributes:
        shared: the streams and the queue of reductions of all its groups.
        states: every sharded module under the root, root first.
        groups: every group under the root, each once.
        record: what ran.
        schedule: when groups communicate.
        backwards_ended: how many backwards ended.
        post_optim_event: what the next forward's gathers wait for, instead of the current stream.
        is_last_backward: whether the end of the next backward waits for reductions.
        finalizes_by_hand: whether only ``finalize_backward`` finishes groups.
    """

    def __init__(self, device: torch.device) -> None:
        """Start with no module."""
        self.shared = RootComm.of(device)
        self.states: tuple[ShardedModule, ...] = ()
        self.groups: tuple[FSDPParamGroup, ...] = ()
        self.is_last_backward = True
        self.finalizes_by_hand = False
        self.backwards_ended = self._depth = 0
        self.post_optim_event: torch.Event | None = None
        self._frame: FrameType | None = None  # what called the outermost forward
        # present while a backward is in progress, dead if it raised: autograd has dropped it
        self._backward_end: weakref.ref[Callable[[], None]] | None = None
        self._at_end: list[Callable[[], object]] = []  # each does nothing when called again
        self.schedule, self.record = SCHEDULES[-1](), StepRecord()
        self.schedule.take_over((), self.record, self.shared.queue)

    def adopt(self, states: Sequence[ShardedModule]) -> None:
        """Take over ``states``, the root's first."""
        self.states = tuple(states)
        self.groups = tuple(dict.fromkeys(group for state in states for group in state.groups))
        for group in self.groups:
            group.share(self.shared)
            group.generation.replacements += 1  # lists of the groups of a root are made again

    def use_schedule(self, schedule: Schedule) -> None:
        """Let ``schedule`` decide when each group communicates.

        Raises:
            ValueError: if another root has it.
            RuntimeError: in the middle of a forward or backward.
        """
        self.require_quiet("set_schedule")
        self.schedule.leave()
        schedule.take_over(self.states, self.record, self.shared.queue)
        self.schedule = schedule

    def require_quiet(self, call: str) -> None:
        """Return if neither a forward nor a backward is in progress; end a backward that raised.

        Raises:
            RuntimeError: if one is, naming ``call``.
        """
        self.end_raised_backward()
        if not self.quiet:
            raise RuntimeError(
                f"{call}() was called in the middle of a forward or backward; call it between "
                "steps (after a step that raised, call reset_iter_state() first)"
            )

    @property
    def quiet(self) -> bool:
        """Whether neither a forward nor a backward is in progress."""
        return self._depth == 0 and self._backward_end is None

    @property
    def idle(self) -> bool:
        """Whether neither a forward nor a backward is in progress and nothing is in flight."""
        return self.quiet and len(self.shared.queue) == 0

    def _release_expired(self) -> None:
        for group in self.groups:
            if group.expired:
                group.release_expired()

    # -- forward ----------------------------------------------------------------------------------

    def enter_forward(self, state: ShardedModule) -> int:
        """Begin the forward of ``state`` and return its place in the order; -1: it has none."""
        if self._depth and state is self.states[0] and not is_running(self._frame):
            self.reset()  # an interrupt ended the last one: torch calls hooks for Exception only
        if self._depth == 0:
            self._begin_forward()
            self._frame = calling_frame()
        self._depth += 1
        for group in state.groups:
            self.record.used_groups.setdefault(group)
        return self.record.forward.append(state) if state.groups else -1

    def _begin_forward(self) -> None:
        if self._backward_end is not None:
            self._recover()
        if torch.is_grad_enabled():
            refuse_compiled_autograd()
        self._release_expired()
        self.schedule.begin(backward=False)
        for group in self.groups:  # see [Note: kept copies]
            if group.gathering.keeps_copies and not group.gathering.within_step:
                group.gathering.drop_copies()
        record = self.record
        outstanding = (group.generation.outstanding for group in self.groups)
        if record.post_forward.names and not any(outstanding):
            record.drop_post_forward()  # forwards without gradients
        record.last_forward, record.forward = record.forward, Order()
        torch.clear_autocast_cache()  # see [Note: autocast]
        event, self.post_optim_event = self.post_optim_event, None
        self.shared.streams.synchronize_with_current(event)

    def leave_forward(self, *, raised: bool) -> None:
        """End a forward; the outermost one returns what was gathered ahead and not used."""
        self._depth -= 1
        if self._depth:
            return
        self._frame = None
        if not raised:
            self.schedule.end(backward=False)
        for group in self.groups:
            group.end_of_forward()
        for give_back in () if torch.is_grad_enabled() else IDLE:  # else backward follows
            give_back()
        if not (raised or torch.is_grad_enabled()):
            end_pass(self.groups)
        if raised:
            emit(EventKind.ABANDONED)

    def _recover(self) -> None:
        """Cleans up after a backward that raised: its end-of-backward callback did not run."""
        warnings.warn(
            "the last backward did not finish, so its gradients are dropped; call "
            "reset_iter_state() on the root after an error to say that this is intended",
            RuntimeWarning,
            stacklevel=2,
        )
        self.reset()

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Let forwards inside leave no trace in the record that ranks share: some ranks run none.

        Forwards in the block find every group unsharded and communicate nothing.
        """
        record, schedule = self.record, self.schedule
        self.schedule, self.record = Schedule(), StepRecord()
        try:
            yield
        finally:
            self.schedule, self.record = schedule, record

    # -- backward ---------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Begin a backward if none is in progress, and arrange for its end.

        The engine drops the callback of a backward that raised: the next arranges for its own.

        Raises:
            RuntimeError: inside of compiled autograd, which accumulates gradients when it likes;
                or where a pipeline schedule splits the backward, and no stage of ours runs it.
        """
        if self._backward_end is not None and self._backward_end() is not None:
            return
        refuse_compiled_autograd()
        assert current_graph_task() != -1, "pre-backward runs inside a backward"
        if not self.finalizes_by_hand:
            self.shared.queue.commit_sealed()  # of earlier backwards of a step
            refuse_split_backward()
        end = self._end_backward  # an object that only the engine holds
        queue_end_of_backward(end)
        self._backward_end = weakref.ref(end)
        self.schedule.begin(backward=True)

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        """Call ``function`` when the present backward has ended or raised; the last comes first."""
        if self._backward_end is not None:
            self._at_end.append(weakref.finalize(self._backward_end(), function))

    def _call_at_end(self) -> None:
        while self._at_end:  # a thread of the engine may hold the callback after backward
            self._at_end.pop()()

    @untraced
    def _end_backward(self) -> None:
        needs_range = functorch_is_active() or is_profiled()
        with set_apart("root_post_backward_callback", "") if needs_range else NOTHING:
            end, self._backward_end = self._backward_end, None
            self._call_at_end()
            self.backwards_ended += 1
            self.schedule.end(backward=True)
            how = BackwardEnd.LAST if self.is_last_backward else BackwardEnd.MORE_FOLLOW
            how = BackwardEnd.BY_HAND if self.finalizes_by_hand else how
            try:
                error = self._end_groups(how)
            except BaseException:
                self._backward_end = end  # so the next forward sees that it did not
                raise
            if how is BackwardEnd.LAST:
                self.commit()
            if TIMELINES:
                mark(Mark.BACKWARD_ENDED)
            if error:
                raise RuntimeError(error)

    def _end_groups(self, how: BackwardEnd) -> str:
        """End the backward of all groups, launch what is to be reduced; return the first error.

        By hand, groups without synchronisation have nothing to reduce, and end now. Groups that a
        pipeline step holds are left, as its backwards may be split.
        """
        used, by_hand = tuple(reversed(self.record.used_groups)), how is BackwardEnd.BY_HAND
        is_last = how is BackwardEnd.LAST
        left = [
            group
            for group in (used if by_hand else ())
            if group.gradients.reduces or LeaseKind.STEP in group.leases.out
        ]
        for group in used:
            if group not in left:
                self.schedule.end_backward(group, is_last=is_last)
        if not by_hand:
            self._end_unused()
        keep_copies_within_step(self.groups, is_last=is_last)
        self.schedule.flush()
        if not by_hand:
            end_pass(self.groups)  # before groups end: a backward that raises leaves no gradients
        errors = [group.gradients.end_backward(left=group in left) for group in used]
        error = next(filter(None, errors), "")
        if not error:
            self.shared.queue.seal()
        if is_last:
            self.record.drop_post_forward()
        return error

    def _end_unused(self) -> None:
        """End what a user or a freed graph holds, where no forward used the group."""
        if len(self.record.used_groups) < len(self.groups):
            for group in self.groups:  # backward reshards what a user gathered and no forward used
                if group not in self.record.used_groups and not group.full_after_backward:
                    group.drop_leases(LeaseKind.USER)
        self._release_expired()

    def commit(self) -> None:
        """Wait for reductions, put the sharded gradients in place, and give frames back.

        Raises:
            RuntimeError: on every rank, if a root extension finds an error.
        """
        try:
            self.shared.queue.commit(self._check_committed if ROOT_EXTENSIONS else None)
            for each in [each for group in self.groups for each in group.extensions]:
                each.on_commit()
        finally:
            self.shared.streams.collect_all()
            for give_back in IDLE:
                give_back()

    def _check_committed(self) -> None:
        for each in ROOT_EXTENSIONS:
            each.at_commit(self.groups)

    def finalize_backward(self) -> None:
        """End the backward of every group now, outside of a backward; ``commit`` follows.

        Raises:
            RuntimeError: in the middle of a forward or backward, or if a parameter received a
                gradient after its group was reduced.
        """
        self.require_quiet("finalize_backward")
        for group in self.record.used_groups:
            if not group.full_after_backward:  # as it is now
                group.leases.drop(LeaseKind.KEPT)
        error = self._end_groups(BackwardEnd.LAST)
        if error:
            self.commit()
            raise RuntimeError(error)

    # -- errors -----------------------------------------------------------------------------------

    def end_raised_backward(self) -> None:
        """End a backward that raised, as the next forward would, if nothing is in progress."""
        raised = self._backward_end is not None and self._backward_end() is None
        if raised and self._depth == 0:
            self._recover()

    def reset(self) -> None:
        """Bring every group back to a clean sharded state and forget the iteration.

        Sharded gradients of backwards that ended well stay, and reductions of theirs are finished.
        """
        if self._backward_end is not None:
            emit(EventKind.ABANDONED)
        emit(EventKind.RESET)
        self.shared.queue.commit_sealed()
        try:
            self.schedule.discard(self.shared.queue)  # while groups know what to reduce
        finally:
            lost = self._reset_groups()
        if lost:
            warnings.warn(
                "gradients of earlier backwards, accumulated without communication, are dropped "
                f"in {', '.join(map(repr, lost))}; call zero_grad() and run all micro-batches of "
                "the step again",
                RuntimeWarning,
                stacklevel=3,
            )

    def _reset_groups(self) -> list[str]:
        """Bring every group to its sharded state; return which lost gradients of ended backwards.

        See ``FSDPParamGroup.reset``.
        """
        if self._depth:  # a forward that did not end is none to prefetch by
            self.record.forward = self.record.last_forward
        self._depth = 0
        self._backward_end = self._frame = None
        self._call_at_end()
        self.record.drop_post_forward()
        for state in reversed(self.states):  # the inner calls first, which began last
            state.reset()
        lost = [group.name for group in self.groups if group.reset()]
        for group in self.groups:  # ``Schedule.begin`` may gather from compute shards
            group.gathering.drop_full()
            group.gathering.within_step = False
        return lost

    # -- streams ----------------------------------------------------------------------------------

    def share_streams(self, streams: CommStreams) -> None:
        """Make every group run on ``streams``."""
        self.shared = replace(self.shared, streams=streams)
        for group in self.groups:
            group.share(self.shared)
