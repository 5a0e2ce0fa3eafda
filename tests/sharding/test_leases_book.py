"""The book of leases against a plain dictionary, under any sequence of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fullshard.sharding.base.states import LeaseKind, Leases, TrainingState

KINDS = st.sampled_from(LeaseKind)
OWNERS = st.integers(0, 3)


class BookOfLeases(RuleBasedStateMachine):
    """A lease is taken, held (at most one), returned (never below none) or dropped by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases()
        self.model: Counter[tuple[LeaseKind, int]] = Counter()

    @rule(kind=KINDS, owner=OWNERS)
    def take(self, kind: LeaseKind, owner: int) -> None:
        self.leases.add(kind, owner)
        self.model[kind, owner] += 1

    @rule(kind=KINDS, owner=OWNERS)
    def hold(self, kind: LeaseKind, owner: int) -> None:
        self.leases.add_once(kind, owner)
        self.model[kind, owner] = max(self.model[kind, owner], 1)

    @rule(kind=KINDS, owner=OWNERS)
    def release(self, kind: LeaseKind, owner: int) -> None:
        self.leases.release(kind, owner)
        self.model[kind, owner] = max(self.model[kind, owner] - 1, 0)

    @rule(kinds=st.lists(KINDS, max_size=3))
    def drop(self, kinds: list[LeaseKind]) -> None:
        self.leases.drop(*kinds)
        for kind, owner in list(self.model):
            if kind in kinds:
                self.model[kind, owner] = 0

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        for kind in LeaseKind:
            out = sum(count for (each, _), count in self.model.items() if each is kind)
            assert self.leases.count(kind) == out
            assert (kind in self.leases.out) == bool(out)

    @invariant()
    def it_is_held_while_any_lease_is_out(self) -> None:
        assert bool(self.leases.out) == any(self.model.values())

    @invariant()
    def the_label_follows_from_the_leases(self) -> None:
        out = {kind for (kind, _), count in self.model.items() if count}
        if LeaseKind.FORWARD in out:
            wanted = TrainingState.FORWARD
        elif out & {LeaseKind.BACKWARD, LeaseKind.RECOMPUTE}:
            wanted = TrainingState.PRE_BACKWARD
        else:
            wanted = TrainingState.IDLE
        assert self.leases.training_state is wanted

    @invariant()
    def what_it_shows_is_what_is_out(self) -> None:
        shown = repr(self.leases)
        for kind in LeaseKind:
            count = sum(each for (other, _), each in self.model.items() if other is kind)
            assert (f"{kind.value}: {count}" in shown) == (count > 0)


TestBookOfLeases = BookOfLeases.TestCase
TestBookOfLeases.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


@pytest.mark.parametrize("kind", LeaseKind)
def test_returning_what_was_dropped_meanwhile_does_nothing(kind: LeaseKind) -> None:
    leases = Leases()
    leases.add(kind, 7)
    leases.drop(kind)
    leases.release(kind, 7)
    assert not leases.out
    leases.add(kind, 7)
    assert leases.count(kind) == 1, "the superfluous return is not owed"


def test_one_owner_cannot_return_the_lease_of_another() -> None:
    leases = Leases()
    leases.add(LeaseKind.GRAPH, 1)
    leases.release(LeaseKind.GRAPH, 2)
    assert leases.count(LeaseKind.GRAPH) == 1


def test_asking_changes_nothing() -> None:
    leases = Leases()
    for kind in LeaseKind:
        assert leases.count(kind) == 0 and kind not in leases.out
        leases.release(kind, 3)
    assert not leases.out and repr(leases) == "Leases()"
