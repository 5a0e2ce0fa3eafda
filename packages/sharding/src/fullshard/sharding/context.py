"""What all groups under one root share: streams, order, reductions, the present backward.

Owns the beginning and the end of the root's forward and of a backward. It decides nothing about a
single
group: it tells each group that a phase ended, and the group's leases do the rest.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fullshard.comm import CommStreams
from fullshard.sharding.compat import current_graph_task, queue_end_of_backward
from fullshard.sharding.reduction import ReductionQueue, SharedComm

if TYPE_CHECKING:
    from fullshard.sharding.module_state import ModuleState
    from fullshard.sharding.param_group import FSDPParamGroup

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
    """

    def __init__(self, device: torch.device) -> None:
        """Starts with no module."""
        self.shared = SharedComm(streams=CommStreams(device), queue=ReductionQueue())
        self.states: tuple[ModuleState, ...] = ()
        self.groups: tuple[FSDPParamGroup, ...] = ()
        self.is_last_backward = True
        self.steps = 0
        self.post_optim_event: torch.Event | None = None
        self.post_forward = Order()
        self.forward = Order()
        self.last_forward = Order()
        self._depth = 0
        self._in_backward = False
        self._end: Callable[[], object] = _nothing
        self._first_forward: dict[FSDPParamGroup, None] = {}  # an ordered set
        self._owners: dict[FSDPParamGroup, ModuleState] = {}

    def adopt(self, states: Sequence[ModuleState]) -> None:
        """Takes over ``states``, the root's first."""
        self.states = tuple(states)
        self.groups = tuple(dict.fromkeys(group for state in states for group in state.groups))
        self._owners = {group: state for state in states for group in state.own_groups}
        for state in states:
            state.context = self
        for group in self.groups:
            group.share(self.shared)

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
            event, self.post_optim_event = self.post_optim_event, None
            self.shared.streams.synchronize_with_current(event)
        self._depth += 1
        state.forward_position = self.forward.append(state) if state.groups else -1
        for group in state.groups:
            self._first_forward.setdefault(group, None)

    def leave_forward(self) -> None:
        """Ends a forward; the outermost one returns what was gathered ahead and not used."""
        self._depth -= 1
        if self._depth == 0:
            self.last_forward = self.forward
            for group in self.groups:
                group.end_of_forward()
            self.shared.streams.collect_all()

    def _recover(self) -> None:
        """Cleans up after a backward that raised: its end-of-backward callback did not run."""
        warnings.warn(
            "the last backward did not finish, so its gradients, and those accumulated before it "
            "without communication, are dropped; call reset_iter_state() on the root after an "
            "error to say that this is intended",
            RuntimeWarning,
            stacklevel=2,
        )
        self.reset()

    # -- backward ---------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Begins a backward if none is in progress, and arranges for its end.

        The engine holds the callback, and drops it with a backward that raised: then the next one
        arranges for its own.
        """
        if self._end() is None:
            assert current_graph_task() != -1, "pre-backward runs inside a backward"

            def end() -> None:
                self._end_backward()

            queue_end_of_backward(end)
            self._end = weakref.ref(end)
            self._in_backward = True

    def _end_backward(self) -> None:
        self._in_backward = False
        self._end = _nothing
        self.steps += 1
        errors = []
        for group in reversed(self._first_forward):
            try:
                group.finish_backward(keep=self._keeps(group))
            except RuntimeError as error:
                errors.append(error)
        self._bury()
        if self.is_last_backward:
            self.shared.queue.commit()
            self.shared.streams.collect_all()
            self._drop_order()
        if errors:
            raise errors[0]

    def _keeps(self, group: FSDPParamGroup) -> bool:
        """Tells whether the module that owns ``group`` keeps it unsharded after backward."""
        owner = self._owners.get(group)
        return owner is not None and not owner.reshard.after_backward(owner.is_root)

    def _drop_order(self) -> None:
        if self.post_forward.names:
            self.post_forward = Order()
            for state in self.states:
                state.forget_order()

    # -- errors -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Brings every group back to a clean sharded state and forgets the iteration."""
        self.shared.queue.discard()
        self._depth = 0
        self._in_backward = False
        self._end = _nothing
        self._drop_order()
        self.forward = Order()
        for state in self.states:
            state.reset()
        for group in self.groups:
            group.reset()

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
