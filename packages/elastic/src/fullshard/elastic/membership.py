"""The groups that take part in a step: the answer of a coordinator, and facts about each group.

Owns the contract of a coordinator and the rule by which groups contribute or receive state.
``TorchftCoordinator`` is the coordinator of real runs. Refuses: moving anything.

[Note: lineage] A step number does not identify a state. Suppose a group commits a step and stops,
and the other groups drop and repeat the step. When the group returns, its step number may be equal
to theirs. Therefore each state has a lineage, a hash of the previous lineage, the quorum, the step
and the contributing groups. Only groups of equal step and lineage contribute. The remaining groups
receive the state of a contributing group. A model that was initialised has a random lineage. All
groups therefore receive the state of one group at the first step.

[Note: odd groups] A group that is built otherwise, or has the name of another group, cannot take
part. All groups of a quorum know the same descriptions, so each group finds the same odd groups. An
odd group raises. The other groups connect without the odd group, in the same quorum, and drop no
step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from fullshard.elastic.errors import ReplicaGroupError

__all__ = ["Coordinator", "Member", "Quorum", "Roster", "next_lineage"]


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """The groups of a step, as the coordinator gives them.

    Attributes:
        number: grows when the groups change, and after a step that was not committed; no two
            quorums with one store have equal numbers.
        names: one per group, in the order of ranks; unique for each start of a group.
        own: the place of this group in ``names``.
        store: the address of a ``TCPStore`` that all groups reach.
    """

    number: int
    names: tuple[str, ...]
    own: int
    store: str

    @property
    def key(self) -> str:
        """A text that no other quorum has."""
        names = hashlib.blake2b(",".join(self.names).encode(), digest_size=8).hexdigest()
        return f"{self.number}.{names}"


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
        sums: how the group adds gradients, in words.
        committed: whether the group has committed a step since its start.
    """

    name: str
    ranks: int
    step: int
    batches: int
    lineage: str
    model: str
    mesh: str = ""
    sums: str = ""
    committed: bool = False

    @property
    def build(self) -> tuple[object, ...]:
        """The properties that must be equal in all groups."""
        return (self.model, self.mesh, self.ranks if self.mesh else 0, self.sums)

    def odds(self, other: Member) -> str:
        """Return in which way this group and ``other`` are built otherwise, for an error."""
        if self.model != other.model:
            return (
                f"replica groups {self.name} and {other.name} differ in names, shapes or dtypes of "
                "parameters, in which of them are trainable, in which modules are sharded, or in "
                "the names that carry() was given; build and shard one model in all groups"
            )
        if self.sums != other.sums:
            return (
                f"replica group {self.name} {self.sums}, and replica group {other.name} "
                f"{other.sums}; give all groups equal average and between"
            )
        described = [
            f"{each.name} of {each.ranks} ranks over {each.mesh or 'all of them'}"
            for each in (self, other)
        ]
        return (
            f"replica groups shard over different meshes: {' and '.join(described)}; give all "
            "groups one mesh with equal placements, or shard over all ranks of each group"
        )


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The groups of a quorum, and who does what.

    Attributes:
        quorum: as the coordinator gave it.
        members: the groups, in the order of ranks.
        own: the place of this group in ``members``.
    """

    quorum: Quorum
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

    @property
    def summary(self) -> str:
        """The groups and what they do, in words."""
        joins = [
            f"{self.members[at].name} joins from {self.members[source].name}"
            for at, source in sorted(self.sources.items())
        ]
        groups = f"groups {', '.join(self.names(self.contributors))}"
        return f"quorum {self.quorum.number}, step {self.state.step}: {'; '.join([groups, *joins])}"

    def settled(self, step: int, batches: int, lineage: str) -> Roster:
        """Return the roster after a committed step: all have one state."""
        members = [
            replace(each, step=step, batches=batches, lineage=lineage, committed=True)
            for each in self.members
        ]
        return replace(self, members=tuple(members))

    def alike(self) -> Roster:
        """Return the roster without odd groups; see [Note: odd groups].

        The groups that are built like the reference stay. The reference is a group that has
        committed a step, of the most frequent build, with most steps, and the first one of those.
        Of several groups with one name, the one stays that the same order names.

        Raises:
            ReplicaGroupError: if this group is odd.
        """
        own = self.members[self.own]
        builds = Counter(member.build for member in self.members)

        def weight(at: int) -> tuple[bool, int, int, int]:
            member = self.members[at]
            return member.committed, builds[member.build], member.step, -at

        order = sorted(range(len(self.members)), key=weight, reverse=True)
        reference = self.members[order[0]]
        if own.build != reference.build:
            raise ReplicaGroupError(own.odds(reference))
        kept: dict[str, int] = {}
        for at in order:
            if self.members[at].build == reference.build:
                kept.setdefault(self.members[at].name, at)
        if kept[own.name] != self.own:
            raise ReplicaGroupError(
                f"another replica group with the name {own.name} takes part; give each group its "
                "own name, and start it once"
            )
        places = sorted(kept.values())
        members = tuple([self.members[at] for at in places])
        return replace(self, members=members, own=places.index(self.own))


def next_lineage(roster: Roster) -> str:
    """Return the lineage of the state after the step of ``roster``; see [Note: lineage]."""
    before, names = roster.state, ",".join(roster.names(roster.contributors))
    text = f"{before.lineage}|{roster.quorum.key}|{before.step}|{names}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
