"""What all groups under one root share: streams, order, reductions, the present backward.

Owns the beginning and the end of the root's forward and of a backward. It decides nothing about a
single
group: it tells each group that a phase ended, and the group's leases do the rest.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fullshard.comm import CommStreams, is_debugging, is_profiled, named_range
from fullshard.sharding.base.compat import (
    current_graph_task,
    in_compiled_autograd,
    queue_end_of_backward,
)
from fullshard.sharding.base.leases import LeaseKind
from fullshard.sharding.groups.buckets import Buckets
from fullshard.sharding.groups.debug import after_forward, after_reset
from fullshard.sharding.hooks.transforms import outside_transforms
from fullshard.sharding.hooks.turns import FreeTurns, Turns
from fullshard.sharding.reduce.reduction import SharedComm

if TYPE_CHECKING:
    from fullshard.sharding.groups.param_group import FSDPParamGroup
    from fullshard.sharding.hooks.module_state import ModuleState

__all__ = ["Order", "RootContext"]


class Order:
    """The modules in the order in which they ran, with multiplicity, and their names."""

    def __init__(self) -> None:
        """Starts empty."""
        self.states: list[weakref.ref[ModuleState]] = []
        self.names: list[str] = []

    def append(self, state: ModuleState) -> int:
        """Adds ``state`` and returns its position."""
        self.states.append(weakref.ref(state))
        self.names.append(state.name)
        return len(self.states) - 1

    def at(self, position: int, asked_by: str) -> ModuleState:
        """Returns the module at ``position``.

        Raises:
            IndexError: if there is none, naming who asked for it.
        """
        if not 0 <= position < len(self.states):
            raise IndexError(
                f"the prefetch policy of {asked_by!r} asked for position {position}; the order has "
                f"positions 0 to {len(self.states) - 1}"
            )
        state = self.states[position]()
        assert state is not None, "a module of the order outlives the order"
        return state


class RootContext:
    """The state of one root.

    Attributes:
        shared: the streams and the queue of reductions of all its groups.
        states: the ``ModuleState`` of every sharded module under the root, root first.
        groups: every group under the root, each once.
        steps: backwards that ended.
        post_optim_event: what the next forward's gathers wait for, instead of the current stream.
        is_last_backward: whether the end of the next backward waits for reductions.
        post_forward: the order of forwards since the last backward.
        forward: the order of the forward in progress.
        last_forward: the order of the forward before it, from which forward prefetches.
        turns: when groups communicate.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts with no module."""
        self.shared = SharedComm.of(device)
        self.states: tuple[ModuleState, ...] = ()
        self.groups: tuple[FSDPParamGroup, ...] = ()
        self.is_last_backward = True
        self.steps = 0
        self.post_optim_event: torch.Event | None = None
        self.post_forward = Order()
        self.forward = Order()
        self.last_forward = Order()
        self.turns: Turns = FreeTurns()
        self._depth = 0
        self._in_backward = False
        self._end: Callable[[], object] = _nothing
        self._first_forward: dict[FSDPParamGroup, None] = {}  # an ordered set
        self._owners: dict[FSDPParamGroup, ModuleState] = {}
        self._buckets = Buckets(self.shared.queue)
        self._group_of: dict[object, FSDPParamGroup] = {}

    def adopt(self, states: Sequence[ModuleState]) -> None:
        """Takes over ``states``, the root's first."""
        self.states = tuple(states)
        self.groups = tuple(dict.fromkeys(group for state in states for group in state.groups))
        self._owners = {group: state for state in states for group in state.own_groups}
        self._group_of = {group.gathering: group for group in self.groups}
        self._buckets.clear()
        for state in states:
            state.context = self
        for group in self.groups:
            group.share(self.shared)

    def take_turns(self, turns: Turns) -> None:
        """Lets every group communicate when ``turns`` say.

        Raises:
            RuntimeError: in the middle of a forward or backward.
        """
        if not self.quiet:
            raise RuntimeError("a forward or backward is in progress; change this between steps")
        self.turns = turns
        self.learn_anew()
        if not turns.free:  # also what this rank never runs has an end of backward
            self._first_forward = dict.fromkeys(self.groups)

    def learn_anew(self) -> None:
        """Forgets which groups share launches; reductions that wait are launched before."""
        self._buckets.flush()
        self._buckets.clear()

    @property
    def quiet(self) -> bool:
        """Whether neither a forward nor a backward is in progress."""
        return self._depth == 0 and not self._in_backward

    def _bury(self) -> None:
        for group in self.groups:
            if group.dead:
                group.bury()

    @property
    def idle(self) -> bool:
        """Whether neither a forward nor a backward is in progress and nothing is in flight."""
        return self.quiet and len(self.shared.queue) == 0

    # -- forward ----------------------------------------------------------------------------------

    def enter_forward(self, state: ModuleState) -> None:
        """Begins the forward of ``state``; the outermost one begins the root's."""
        if self._depth == 0:
            if self._in_backward:
                self._recover()
            self._bury()
            if not any(group.outstanding for group in self.groups):
                self._drop_order()  # forwards without gradients
            self.forward = Order()
            self.shared.gathered.clear()
            if is_debugging():
                self.learn_anew()
            event, self.post_optim_event = self.post_optim_event, None
            self.shared.streams.synchronize_with_current(event)
            self.turns.begin_forward()
        self._depth += 1
        state.forward_position = self.forward.append(state) if state.groups else -1
        for group in state.groups:
            self._first_forward.setdefault(group, None)

    def leave_forward(self, *, raised: bool) -> None:
        """Ends a forward; the outermost one returns what was gathered ahead and not used."""
        self._depth -= 1
        if self._depth == 0:
            self.last_forward = self.forward
            if not raised:
                self.turns.end()
            for group in self.groups:
                group.end_of_forward()
            if self.turns.free and not raised:
                self._buckets.learn([self._group_of[each] for each in self.shared.gathered])
            self.shared.streams.collect_all()
            after_forward(raised=raised)

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
        """Lets forwards inside leave no trace in the orders that ranks share: some ranks run none.

        Such forwards find every group unsharded and communicate nothing.
        """
        orders = self.post_forward, self.last_forward, self.forward
        first, turns = dict(self._first_forward), self.turns
        hidden = {state: list(state.hidden) for state in self.states}
        self.post_forward, self.last_forward, self.turns = Order(), Order(), FreeTurns()
        try:
            yield
        finally:
            self.post_forward, self.last_forward, self.forward = orders
            self._first_forward, self.turns = first, turns
            for state, positions in hidden.items():
                state.hidden[:] = positions

    # -- backward ---------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Begins a backward if none is in progress, and arranges for its end.

        The engine holds the callback, and drops it with a backward that raised: then the next one
        arranges for its own.

        Raises:
            RuntimeError: inside of compiled autograd, which accumulates gradients when it likes.
        """
        if self._end() is None:
            if in_compiled_autograd():
                raise RuntimeError(
                    "the backward of a sharded module was captured by compiled autograd, in which "
                    "gradients would be lost; turn compiled autograd off. Compiled forwards work"
                )
            assert current_graph_task() != -1, "pre-backward runs inside a backward"

            def end() -> None:
                if is_profiled():
                    with named_range("root_post_backward_callback", ""):
                        return self._end_backward()
                return self._end_backward()

            queue_end_of_backward(end)
            self._end = weakref.ref(end)
            self._in_backward = True
            self.turns.begin_backward()

    @outside_transforms
    def _end_backward(self) -> None:
        self._in_backward = False
        self._end = _nothing
        self.steps += 1
        self.turns.end()
        errors = []
        for group in reversed(self._first_forward):
            try:
                group.finish_backward(keep=self._keeps(group))
            except RuntimeError as error:
                errors.append(error)
        self._end_unused()
        self._bury()
        self._buckets.flush()
        if not errors:
            self.shared.queue.seal()
        if self.is_last_backward:
            self.shared.queue.commit()
            self.shared.streams.collect_all()
            self._drop_order()
        if errors:
            raise errors[0]

    def _end_unused(self) -> None:
        """Reshards what a user gathered and no forward has ever used: a backward ends that, too."""
        if len(self._first_forward) < len(self.groups):
            for group in self.groups:
                if group not in self._first_forward and not self._keeps(group):
                    group.drop_leases(LeaseKind.USER)

    def _keeps(self, group: FSDPParamGroup) -> bool:
        """Tells whether the module that owns ``group`` keeps it unsharded after backward."""
        owner = self._owners.get(group) if self.turns.free else None
        return owner is not None and not owner.reshard.after_backward(owner.is_root)

    def _drop_order(self) -> None:
        if self.post_forward.names:
            self.post_forward = Order()
            for state in self.states:
                state.forget_order()

    # -- errors -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Brings every group back to a clean sharded state and forgets the iteration.

        Sharded gradients of backwards that ended well stay, and reductions of theirs are finished.
        """
        after_reset(in_backward=self._in_backward)
        self.shared.queue.commit_sealed()
        self._depth = 0
        self._in_backward = False
        self._end = _nothing
        self._drop_order()
        self.forward = Order()
        for state in self.states:
            state.reset()
        lost = [group.name for group in self.groups if group.reset()]
        self._buckets.abandon()
        self.shared.queue.discard()
        if lost:
            warnings.warn(
                "gradients of earlier backwards, accumulated without communication, are dropped "
                f"in {', '.join(map(repr, lost))}; to keep such gradients from backwards that "
                "raise, at the cost of a second copy, call set_keep_unsynced_gradients(True)",
                RuntimeWarning,
                stacklevel=3,
            )

    def reset_statistics(self) -> None:
        """Counts steps, collectives and host time from zero."""
        self.steps = 0
        for state in self.states:
            state.host_ns = 0
        for group in self.groups:
            group.gathering.gathers = 0
            group.gradients.reductions = 0

    # -- streams ----------------------------------------------------------------------------------

    def share_streams(self, streams: CommStreams) -> None:
        """Makes every group run on ``streams``."""
        self.shared = replace(self.shared, streams=streams)
        for group in self.groups:
            group.share(self.shared)


def _nothing() -> None:
    """Stands for a callback that is not there."""
