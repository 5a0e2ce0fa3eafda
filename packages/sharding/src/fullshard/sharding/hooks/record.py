"""The record of a root's step: which modules ran, in which order, and which groups were gathered.

Owns what the communication schedule, prefetching and the division into coalesced launches read. It
decides nothing. torch's ``fully_shard`` records the post-forward order too, and prefetches by it;
the rest is ours, because forwards without gradients and recomputations must find their place in it.
"""

from __future__ import annotations

from typing import Protocol

from torch import nn

from fullshard.sharding.groups.forward_pass import ForwardPass
from fullshard.sharding.groups.param_group import FSDPParamGroup

__all__ = ["Order", "ShardedModule", "StepRecord"]


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
    """The modules in the order in which they ran, with multiplicity, and their names."""

    def __init__(self) -> None:
        """Starts empty."""
        self.states: list[ShardedModule] = []
        self.names: list[str] = []

    def append(self, state: ShardedModule) -> int:
        """Adds ``state`` and returns its position."""
        self.states.append(state)
        self.names.append(state.name)
        return len(self.states) - 1

    def at(self, position: int, asked_by: str) -> ShardedModule:
        """Returns the module at ``position``.

        Raises:
            IndexError: if there is none, naming who asked for it.
        """
        if not 0 <= position < len(self.states):
            raise IndexError(
                f"the prefetch policy of {asked_by!r} asked for position {position}; the order has "
                f"positions 0 to {len(self.states) - 1}"
            )
        return self.states[position]


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
        self.drop_post_forward()

    def begin_forward(self) -> None:
        """Begins the order of a root forward; the one before it stays to prefetch by."""
        self.last_forward, self.forward = self.forward, Order()
        self.gathered = []

    def drop_post_forward(self) -> None:
        """Forgets in which order forwards ended."""
        self.post_forward = Order()
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
