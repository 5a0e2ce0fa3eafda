"""The states of a parameter group, and the only transitions between them.

Owns the two enums and the table; it refuses anything that is not in the table, so that a bug in the
engine ends in an error here and not in a wrong gradient later.
"""

from __future__ import annotations

from enum import Enum

__all__ = [
    "TRANSITIONS",
    "IllegalTransitionError",
    "ShardedState",
    "TrainingState",
    "check_transition",
]


class ShardedState(Enum):
    """Where the parameters of a group are."""

    SHARDED = "sharded"
    """The modules hold this rank's shards, as DTensors. No unsharded memory is in use."""

    SHARDED_POST_FORWARD = "sharded-post-forward"
    """Resharded after forward to the shards of a post-forward mesh, from which backward gathers."""

    UNSHARDING = "unsharding"
    """The gather was issued; the modules still hold what they held before it."""

    UNSHARDED = "unsharded"
    """The modules hold full parameters, as plain tensors."""

    __hash__ = object.__hash__  # Enum's own is slow, and each transition is looked up


class TrainingState(Enum):
    """What a group is doing: a label read off its leases, which decides nothing."""

    IDLE = "idle"
    """Nobody uses the group."""

    FORWARD = "forward"
    """From pre-forward to post-forward."""

    PRE_BACKWARD = "pre-backward"
    """From pre-backward, or a recomputation, to post-backward."""

    POST_BACKWARD = "post-backward"
    """Its gradients are being reduced."""


class IllegalTransitionError(AssertionError):
    """A transition that the table does not hold: a bug of the engine, never of its user."""


TRANSITIONS: dict[ShardedState, frozenset[ShardedState]] = {
    ShardedState.SHARDED: frozenset({ShardedState.UNSHARDING}),
    ShardedState.SHARDED_POST_FORWARD: frozenset({ShardedState.UNSHARDING, ShardedState.SHARDED}),
    ShardedState.UNSHARDING: frozenset(
        {ShardedState.UNSHARDED, ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD}
    ),
    ShardedState.UNSHARDED: frozenset({ShardedState.SHARDED, ShardedState.SHARDED_POST_FORWARD}),
}
"""From each state, those that may follow it. A gather that nobody claimed is discarded: that is the
way from UNSHARDING back."""


def check_transition(before: ShardedState, after: ShardedState, name: str) -> None:
    """Returns if ``before`` may be followed by ``after``.

    Raises:
        IllegalTransitionError: if not, naming the group.
    """
    if after not in TRANSITIONS[before]:
        allowed = ", ".join(sorted(state.name for state in TRANSITIONS[before]))
        raise IllegalTransitionError(
            f"parameter group {name!r} cannot go from {before.name} to {after.name}; from there it "
            f"may go to {allowed}"
        )
