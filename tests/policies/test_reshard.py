"""Reshard policies: what they answer, and that each is the argument that it names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fullshard.comm import EventKind, EventLog, observe
from fullshard.policies import KeepUnsharded, ReshardAlways, ReshardExceptRoot
from fullshard.sharding import FixedReshard
from support.ranks import distributed
from support.surface.model import batch, build, sharded

KEPT = FixedReshard(forward=False, backward=False)
SAME: list[tuple[Any, Any, list[int]]] = [
    (ReshardExceptRoot(), None, [5, 5, 5]),  # the root once, two blocks twice
    (ReshardAlways(), True, [6, 6, 6]),
    (KeepUnsharded(), False, [3, 3, 3]),
    (KeepUnsharded(after_backward_too=True), KEPT, [3, 0, 0]),
]


@pytest.mark.parametrize("policy", [policy for policy, _, _ in SAME], ids=lambda value: repr(value))
def test_each_policy_is_frozen_and_equal_by_value(policy: Any) -> None:
    assert policy == dataclasses.replace(policy)
    assert hash(policy) == hash(dataclasses.replace(policy))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1


def _steps(reshard: Any) -> list[list[tuple[EventKind, str]]]:
    """Every unshard and reshard of three backwards; the parameters do not change between them."""
    net = sharded(build(), reshard_after_forward=reshard)
    seen = []
    for step in range(3):
        log = EventLog()
        with observe(log):
            net(batch(step)).sum().backward()
        events = log.of(EventKind.UNSHARD, EventKind.RESHARD)
        seen.append([(event.kind, event.name) for event in events])
    return seen


@pytest.mark.parametrize(("policy", "argument", "gathers"), SAME, ids=lambda value: repr(value))
@distributed(2)
def test_a_policy_does_what_the_argument_does(
    policy: Any, argument: Any, gathers: list[int]
) -> None:
    found = _steps(policy)
    assert found == _steps(argument)
    assert [sum(kind is EventKind.UNSHARD for kind, _ in each) for each in found] == gathers
