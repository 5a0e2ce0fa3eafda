"""The transition table: every pair of states is tried, and a real group walks only along it."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch.distributed as dist

from fullshard.sharding.base.states import (
    TRANSITIONS,
    IllegalTransitionError,
    LeaseKind,
    Leases,
    ShardedState,
    TrainingState,
    illegal_transition,
)
from fullshard.sharding.gather.gathering import Gathering
from support.events.models import make_inputs, make_net
from support.events.recorder import group_of, ours
from support.ranks import distributed

SHARDED = ShardedState.SHARDED
UNSHARDING = ShardedState.UNSHARDING
UNSHARDED = ShardedState.UNSHARDED

# Full parameters appear only by a gather. It ends in full parameters or is discarded.
LEGAL = {
    (SHARDED, UNSHARDING),
    (UNSHARDING, UNSHARDED),
    (UNSHARDING, SHARDED),
    (UNSHARDED, SHARDED),
}
PAIRS = list(itertools.product(ShardedState, ShardedState))


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda state: state.name)
def test_a_transition_is_allowed_if_and_only_if_it_makes_sense(
    before: ShardedState, after: ShardedState
) -> None:
    assert (after in TRANSITIONS[before]) == ((before, after) in LEGAL)
    message = str(illegal_transition(before, after, "blocks.3"))
    assert "'blocks.3'" in message and f"from {before.name} to {after.name}" in message
    allowed = message.rpartition("may go to ")[2].split(", ")
    assert set(allowed) == {state.name for state in ShardedState if (before, state) in LEGAL}


def test_an_illegal_transition_is_our_bug_and_no_users_error() -> None:
    assert issubclass(IllegalTransitionError, AssertionError)


@distributed(2)
def test_every_transition_happens_in_a_step_and_no_other_does() -> None:
    walked: set[tuple[ShardedState, ShardedState]] = set()
    become = Gathering._become

    def recording(group: Gathering, after: ShardedState) -> None:
        walked.add((group.state, after))
        become(group, after)

    with mock.patch.object(Gathering, "_become", recording):
        net = make_net(ours)
        net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1]])
        net(make_inputs(dist.get_rank())).sum().backward()
        net.blocks[0].unshard(async_op=True)
        net.blocks[0].reshard()
    assert walked == LEGAL


@distributed(2)
def test_a_group_refuses_what_the_table_does_not_hold_and_stays_where_it_was() -> None:
    net = make_net(ours)
    group = group_of(net.blocks[0])
    with pytest.raises(IllegalTransitionError, match="SHARDED to UNSHARDED"):
        group.gathering._become(UNSHARDED)
    assert group.state is SHARDED


def test_a_lease_of_a_forward_or_backward_is_a_use_and_no_other_is() -> None:
    uses = {
        LeaseKind.FORWARD: TrainingState.FORWARD,
        LeaseKind.BACKWARD: TrainingState.PRE_BACKWARD,
        LeaseKind.RECOMPUTE: TrainingState.PRE_BACKWARD,
    }
    for kind in LeaseKind:
        leases = Leases()
        leases.add(kind)
        assert leases.training_state is uses.get(kind, TrainingState.IDLE)
        assert leases.in_use == (kind in uses)


@distributed(2)
def test_the_training_state_is_read_off_the_leases() -> None:
    net = make_net(ours)
    block, group = net.blocks[1], group_of(net.blocks[1])
    seen: dict[str, TrainingState] = {}

    def note(moment: str) -> None:
        seen[moment] = group.training_state

    block.up.register_forward_hook(lambda *_: note("inside forward"))
    net.blocks[2].up.register_forward_hook(lambda *_: note("after forward"))
    net.head.register_full_backward_hook(lambda *_: note("before backward"))
    block.down.register_full_backward_hook(lambda *_: note("inside backward"))
    net.blocks[0].down.register_full_backward_hook(lambda *_: note("after backward"))
    note("before")
    net(make_inputs(dist.get_rank())).sum().backward()
    note("at the end")
    assert seen == {
        "before": TrainingState.IDLE,
        "inside forward": TrainingState.FORWARD,
        "after forward": TrainingState.IDLE,
        "before backward": TrainingState.IDLE,
        "inside backward": TrainingState.PRE_BACKWARD,
        "after backward": TrainingState.POST_BACKWARD,
        "at the end": TrainingState.IDLE,
    }
