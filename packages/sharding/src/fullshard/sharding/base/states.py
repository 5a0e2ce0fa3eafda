"""The state machine of a parameter group: its states, the transitions between them, its leases.

Owns the enums, the table and the book of leases; transitions outside the table are an error, so
that a bug in the engine does not lead to a wrong gradient. Gathering and freeing parameters is left
to the group. A lease records the owner of an unsharded group: the group is resharded when its last
lease returns. For this reason, checkpointing, several forwards before a backward, tied weights and
a manual ``unshard()`` need no special case.
"""

from __future__ import annotations

from enum import Enum

__all__ = [
    "TRANSITIONS",
    "BackwardEnd",
    "BackwardStage",
    "IllegalTransitionError",
    "LeaseKind",
    "Leases",
    "ShardedState",
    "TrainingState",
    "illegal_transition",
]


class ShardedState(Enum):
    """Where the parameters of a group are."""

    SHARDED = "sharded"
    """The modules hold this rank's shards, as DTensors. No unsharded memory is in use."""

    UNSHARDING = "unsharding"
    """The gather was issued; the modules still hold what they held before it."""

    UNSHARDED = "unsharded"
    """The modules hold full parameters, as plain tensors."""

    __hash__ = object.__hash__  # Enum's own is slow, and each transition is looked up


class TrainingState(Enum):
    """The activity of a group, as its leases show it; ``Leases.in_use`` decides by it."""

    IDLE = "idle"
    """Nobody uses the group."""

    FORWARD = "forward"
    """From pre-forward to post-forward."""

    PRE_BACKWARD = "pre-backward"
    """From pre-backward, or a recomputation, to post-backward."""

    POST_BACKWARD = "post-backward"
    """Its gradients are being reduced."""


class BackwardStage(Enum):
    """How far the present backward has come in a group."""

    NONE = "none"
    """It has not reached the group."""

    REACHED = "reached"
    """It reached the outputs of a forward of the group."""

    GRADIENT = "gradient"
    """It reached a parameter, and no output before; see [Note: unannounced backward]."""

    REDUCED = "reduced"
    """The group reduced its gradients."""

    REACHED_AGAIN = "reached again"
    """After that it reached a forward, whose gradients are still to be reduced."""

    __hash__ = object.__hash__  # as above


class BackwardEnd(Enum):
    """How a backward that did not raise ends."""

    LAST = "last"
    """The optimizer steps next: all is reduced, and gradients are put in place."""

    MORE_FOLLOW = "more follow"
    """Other backwards of the step follow: all is reduced."""

    BY_HAND = "by hand"
    """``finalize_backward`` reduces later, once for several backwards."""


class IllegalTransitionError(AssertionError):
    """A transition that the table does not hold: a bug of the engine, never of its user."""


TRANSITIONS: dict[ShardedState, frozenset[ShardedState]] = {
    ShardedState.SHARDED: frozenset({ShardedState.UNSHARDING}),
    ShardedState.UNSHARDING: frozenset({ShardedState.UNSHARDED, ShardedState.SHARDED}),
    ShardedState.UNSHARDED: frozenset({ShardedState.SHARDED}),
}
"""From each state, those that may follow it. A gather that nobody claimed is discarded: that is the
way from UNSHARDING back."""


def illegal_transition(
    before: ShardedState, after: ShardedState, name: str
) -> IllegalTransitionError:
    """Return the error of the group ``name`` for a transition that the table does not hold."""
    allowed = ", ".join(sorted(state.name for state in TRANSITIONS[before]))
    return IllegalTransitionError(
        f"parameter group {name!r} cannot go from {before.name} to {after.name}; from there it "
        f"may go to {allowed}"
    )


# -- leases ---------------------------------------------------------------------------------------


class LeaseKind(Enum):
    """The reasons for which a group may be unsharded."""

    FORWARD = "forward"
    """From pre-forward to post-forward."""

    RECOMPUTE = "recompute"
    """A forward inside a backward ended; returned by the post-backward that it was run for."""

    GRAPH = "graph"
    """Kept by a forward for its backward; returned by that, with its graph, or in a later step."""

    BACKWARD = "backward"
    """From pre-backward to post-backward."""

    PREFETCH = "prefetch"
    """Gathered ahead of use; handed to whoever uses the group next."""

    USER = "user"
    """From ``unshard()`` to ``reshard()``, or to the first forward or backward that uses it."""

    BLOCK = "block"
    """For a ``with unsharded(...)`` block."""

    STEP = "step"
    """For all micro-batches of a step: what one of them gathers stays for the others."""

    KEPT = "kept"
    """Left unsharded across steps, until the parameters change."""

    __hash__ = object.__hash__  # Enum's own is slow, and a book is opened dozens of times a step


_AHEAD = (LeaseKind.PREFETCH, LeaseKind.KEPT, LeaseKind.USER)
_LABELS = (
    (LeaseKind.FORWARD, TrainingState.FORWARD),
    (LeaseKind.BACKWARD, TrainingState.PRE_BACKWARD),
    (LeaseKind.RECOMPUTE, TrainingState.PRE_BACKWARD),
)


class Leases:
    """The leases of one group: per kind and owner, how many are out.

    An owner is the number of a forward (GRAPH and BACKWARD leases have such a number), or 0 if the
    owner does not matter.

    Attributes:
        out: per kind of which one is out, the owner of each; empty: the group has no lease.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.out: dict[LeaseKind, list[int]] = {}

    def add(self, kind: LeaseKind, owner: int = 0) -> None:
        """Add a lease."""
        self.out.setdefault(kind, []).append(owner)

    def claim(self, kind: LeaseKind, owner: int = 0) -> None:
        """Add the lease of a module, and drop the leases that held the group until its use.

        Such leases are PREFETCH, KEPT and USER.
        """
        out = self.out
        for ahead in _AHEAD if out else ():
            out.pop(ahead, None)
        out.setdefault(kind, []).append(owner)

    def add_once(self, kind: LeaseKind, owner: int = 0) -> None:
        """Add a lease, unless its owner has one of this kind."""
        if owner not in self.out.setdefault(kind, [owner]):
            self.out[kind].append(owner)

    def release(self, kind: LeaseKind, owner: int = 0) -> None:
        """Return a lease; do nothing if it was dropped before."""
        owners = self.out.get(kind)
        if owners and owner in owners:
            owners.remove(owner)
            if not owners:
                del self.out[kind]

    def drop(self, *kinds: LeaseKind) -> None:
        """Return every lease of each of ``kinds``."""
        for kind in kinds:
            self.out.pop(kind, None)

    @property
    def in_use(self) -> bool:
        """Whether a forward or backward is using the group."""
        return self.training_state is not TrainingState.IDLE

    @property
    def training_state(self) -> TrainingState:
        """The label that these leases amount to."""
        for kind, label in _LABELS:
            if kind in self.out:
                return label
        return TrainingState.IDLE

    def __repr__(self) -> str:
        """Show the counts that are not zero."""
        out = ", ".join(f"{kind.value}: {len(owners)}" for kind, owners in self.out.items())
        return f"Leases({out})"
