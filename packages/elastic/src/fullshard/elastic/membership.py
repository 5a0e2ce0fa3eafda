"""The groups that take part in a step: the answer of a coordinator, and facts about each group.

Owns the contract of a coordinator and the rule by which groups contribute or receive state.
``TorchftCoordinator`` is the coordinator of real runs. Refuses: moving anything.

[Note: lineage] A step number does not identify a state. Suppose a group commits a step and stops,
and the other groups drop and repeat the step. When the group returns, its step number may be equal
to theirs. Therefore each state has a lineage, a hash of the previous lineage, the quorum, the step
and the contributing groups. Only groups of equal step and lineage contribute. The remaining groups
receive the state of a contributing group. A model that was initialised has a random lineage. All
groups therefore receive the state of one group at the first step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

__all__ = ["Coordinator", "Member", "Quorum", "Roster", "next_lineage"]


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """The groups of a step, as the coordinator gives them.

    Attributes:
        number: grows when the groups change, and after a step that was not committed.
        names: one per group, in the order of ranks; unique for each start of a group.
        own: the place of this group in ``names``.
        store: the address of a ``TCPStore`` that all groups reach.
    """

    number: int
    names: tuple[str, ...]
    own: int
    store: str


class Coordinator(Protocol):
    """Agreement between groups on who is there, and of the ranks of a group on a step.

    Every rank of a group calls each method, in one order.
    """

    def quorum(self, step: int, failures: int) -> Quorum:
        """Return the groups of the next step.

        Args:
            step: how many steps this group has committed.
            failures: how many steps it has dropped since then; the quorum gets a new number if any.

        Raises:
            ReplicaGroupError: if there is no quorum in time.
        """

    def agree(self, step: int, ok: bool) -> bool:
        """Return whether ``ok`` is true on all ranks of this group.

        Raises:
            ReplicaGroupError: if a rank of this group does not answer in time.
        """

    def close(self) -> None:
        """Leave the run."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """The description of a group, exchanged when a quorum is new.

    Attributes:
        name: the group's.
        ranks: how many ranks it has.
        step: how many steps it has committed.
        batches: how many batches were in them.
        lineage: see [Note: lineage].
        model: a digest of names, shapes and dtypes of the parameters.
        mesh: over which ranks the model is sharded; empty: over all ranks of the group, in order.
    """

    name: str
    ranks: int
    step: int
    batches: int
    lineage: str
    model: str
    mesh: str = ""


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The groups of a quorum, and who does what.

    Attributes:
        number: of the quorum.
        members: the groups, in the order of ranks.
        own: the place of this group.
    """

    number: int
    members: tuple[Member, ...]
    own: int

    @cached_property
    def contributors(self) -> tuple[int, ...]:
        """The places of the groups that contribute gradients; their states are equal.

        Groups that committed most steps contribute, if their lineage is the most frequent one.
        """
        most = max(member.step for member in self.members)
        ahead = [member.lineage for member in self.members if member.step == most]
        chosen = Counter(ahead).most_common(1)[0][0]  # ties: the first in the order of ranks
        found = enumerate(self.members)
        return tuple([i for i, m in found if m.step == most and m.lineage == chosen])

    @cached_property
    def sources(self) -> dict[int, int]:
        """By the place of each group that receives state, the place of the group that sends it."""
        joining = [at for at in range(len(self.members)) if at not in self.contributors]
        return {at: self.contributors[k % len(self.contributors)] for k, at in enumerate(joining)}

    @property
    def state(self) -> Member:
        """A group whose state is that of the run."""
        return self.members[self.contributors[0]]

    def names(self, places: tuple[int, ...]) -> tuple[str, ...]:
        """Return the names of the groups in ``places``."""
        return tuple([self.members[at].name for at in places])

    def settled(self, step: int, batches: int, lineage: str) -> Roster:
        """Return the roster after a committed step: all have one state."""
        members = tuple(
            [
                Member(
                    name=each.name,
                    ranks=each.ranks,
                    step=step,
                    batches=batches,
                    lineage=lineage,
                    model=each.model,
                    mesh=each.mesh,
                )
                for each in self.members
            ]
        )
        return Roster(number=self.number, members=members, own=self.own)


def next_lineage(before: str, roster: Roster, step: int) -> str:
    """Return the lineage of the state after ``step``; see [Note: lineage]."""
    names = ",".join(roster.names(roster.contributors))
    text = f"{before}|{roster.number}|{step}|{names}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
