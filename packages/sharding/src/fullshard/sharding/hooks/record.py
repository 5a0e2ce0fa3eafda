"""The record of a root's step: which modules ran, in which order, and which groups were gathered.

Owns what the communication schedule, prefetching and the division into coalesced launches read. It
decides nothing. torch's ``fully_shard`` records the post-forward order too, and prefetches by it;
the rest is ours, because forwards without gradients and recomputations must find their place in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from torch import nn

from fullshard.sharding.groups.forward_pass import ForwardPass
from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = ["Ask", "Order", "ShardedModule", "StepRecord"]


Ask: TypeAlias = Callable[[Sequence[str], int], Sequence[int]]
"""A question of ``PrefetchPolicy``."""


class ShardedModule(Protocol):
    """What a root knows of a sharded module under it; see ``ModuleState``."""

    modules: tuple[nn.Module, ...]
    name: str
    groups: list[FSDPParamGroup]
    own_groups: list[FSDPParamGroup]
    unshard_in_backward: bool
    reshards_after_backward: bool
    host_ns: int

    def reset(self) -> None:
        """Forgets the calls in progress."""
        ...


class Order:
    """The modules in the order in which they ran, with multiplicity.

    Attributes:
        states: the modules.
        names: their names.
        ahead: what a prefetch policy answered for positions in this order.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.states: list[ShardedModule] = []
        self.names: list[str] = []
        self.ahead: dict[int, list[ShardedModule]] = {}

    def append(self, state: ShardedModule) -> int:
        """Adds ``state`` and returns its position."""
        self.states.append(state)
        self.names.append(state.name)
        self.ahead.clear()
        return len(self.states) - 1

    def ask(self, position: int, policy: Ask) -> list[ShardedModule]:
        """Returns what ``policy`` wants gathered at ``position``, and keeps it in ``ahead``.

        Raises:
            IndexError: if it asks for a position that does not exist.
        """
        wanted = policy(self.names, position)
        for each in wanted:
            if not 0 <= each < len(self.states):
                raise IndexError(
                    f"the prefetch policy of {self.names[position]!r} asked for position {each}; "
                    f"the order has positions 0 to {len(self.states) - 1}"
                )
        self.ahead[position] = [self.states[each] for each in wanted]
        return self.ahead[position]


class StepRecord:
    """What ran under one root, and what was gathered for it.

    Attributes:
        forward: the order of the forward in progress.
        last_forward: that of the forward before it, from which forward prefetches.
        post_forward: the order in which forwards ended since the last backward.
        hidden: per module the places in it that forwards without gradients took.
        used: the groups that any forward has used, in the order in which they first were.
        gathered: the groups gathered since the root's last forward began, in order.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self.forward = Order()
        self.last_forward = Order()
        self.used: dict[FSDPParamGroup, None] = {}  # an ordered set
        self.gathered: list[FSDPParamGroup] = []
        self.post_forward = self._last_post_forward = Order()
        self.drop_post_forward()

    def begin_forward(self) -> None:
        """Begins the order of a root forward; the one before it stays to prefetch by."""
        if self.forward.states != self.last_forward.states:  # else what was asked of it holds
            self.last_forward = self.forward
        self.forward = Order()
        self.gathered = []

    def begin_backward(self) -> None:
        """Goes on with the last backward's order if this one's is the same: it was asked of."""
        if self.post_forward.states == self._last_post_forward.states:
            self.post_forward = self._last_post_forward

    def drop_post_forward(self) -> None:
        """Forgets in which order forwards ended."""
        self._last_post_forward, self.post_forward = self.post_forward, Order()
        self.hidden: dict[ShardedModule, list[int]] = {}

    def place(self, state: ShardedModule, kept_for: ForwardPass | None, *, recompute: bool) -> None:
        """Gives a forward of ``state`` that ended its place in the post-forward order.

        Reentrant checkpointing runs the forward without gradients and reruns it in backward with
        them: the rerun takes the place that the hidden forward had. ``kept_for`` is the forward
        that a backward may follow, if this is one.
        """
        if recompute:
            if kept_for is not None and self.hidden.get(state):
                kept_for.position = self.hidden[state].pop()
            return
        position = self.post_forward.append(state)
        if kept_for is not None:
            kept_for.position = position
        else:
            self.hidden.setdefault(state, []).append(position)
