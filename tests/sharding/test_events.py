"""Whole event orders, as an observer sees them: what a step does to every module and group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import EventKind, EventLog, StatisticsObserver, observe
from fullshard.policies import DepthPrefetch
from support.events.models import batch, make_net
from support.events.recorder import (
    assert_all_returned,
    lifecycle,
    ours,
)
from support.ranks import distributed


def events_of(action: Any) -> list[str]:
    """The life-cycle events while ``action`` runs."""
    log = EventLog()
    with observe(log):
        action()
    return lifecycle(log)


def block_forward(name: str) -> list[str]:
    """A block that nobody gathered ahead, from its pre-forward to its resharding."""
    kinds = ("pre_forward", "unshard", "wait", "post_forward", "reshard")
    return [f"{kind} {name}" for kind in kinds]


# -- one step -------------------------------------------------------------------------------------


@distributed(2, 4)
def test_the_events_of_a_forward() -> None:
    net = make_net(ours)
    assert events_of(lambda: net(batch()))[:-1] == [
        "pre_forward root",
        "unshard root",
        "wait root",
        *block_forward("0"),
        *block_forward("1"),
        *block_forward("2"),
        "post_forward root",
    ]


@distributed(2, 4)
def test_the_events_of_a_backward() -> None:
    net = make_net(ours)
    loss = net(batch(requires_grad=True)).sum()
    assert events_of(loss.backward) == [
        "pre_backward root",
        "prefetch 2",
        "unshard 2",
        "pre_backward 2",
        "wait 2",
        "prefetch 1",
        "unshard 1",
        "post_backward 2",
        "reshard 2",
        "reduce 2",
        "pre_backward 1",
        "wait 1",
        "prefetch 0",
        "unshard 0",
        "post_backward 1",
        "reshard 1",
        "reduce 1",
        "pre_backward 0",
        "wait 0",
        "post_backward 0",
        "reshard 0",
        "reduce 0",
        "post_backward root",
        "reshard root",
        "reduce root",
        "reduce_done 2",
        "reduce_done 1",
        "reduce_done 0",
        "reduce_done root",
    ]


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_the_events_of_a_step_for_either_answer_of_reshard_after_forward(reshard: bool) -> None:
    net = make_net(ours, reshard_after_forward=reshard, blocks=1)
    events = events_of(lambda: net(batch()).sum().backward())
    after = ["reshard 0"] if reshard else []
    root_again = ["unshard root", "wait root"] if reshard else []
    again = ["prefetch 0", "unshard 0"] if reshard else []
    assert events == [
        "pre_forward root",
        "unshard root",
        "wait root",
        "pre_forward 0",
        "unshard 0",
        "wait 0",
        "post_forward 0",
        *after,
        "post_forward root",
        *(["reshard root"] if reshard else []),
        "pre_backward root",
        *root_again,
        *again,
        "pre_backward 0",
        *(["wait 0"] if reshard else []),
        "post_backward 0",
        "reshard 0",
        "reduce 0",
        "post_backward root",
        "reshard root",
        "reduce root",
        "reduce_done 0",
        "reduce_done root",
    ]


@distributed(2)
def test_the_second_step_has_the_events_of_the_first() -> None:
    net = make_net(ours)
    first, second = (events_of(lambda: net(batch()).sum().backward()) for _ in range(2))
    assert first == second


@distributed(2)
def test_every_rank_sees_the_same_events() -> None:
    net = make_net(ours)
    mine = events_of(lambda: net(batch()).sum().backward())
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    assert all(each == mine for each in everyone)


@distributed(2)
def test_the_events_of_bytes_stand_between_those_of_the_group() -> None:
    net = make_net(ours, blocks=1)
    log = EventLog()
    with observe(log):
        net(batch()).sum().backward()
    of_block = [event.kind for event in log.events if event.name == "blocks.0"]
    # ranks of one host share memory: what is gathered in place is not unpacked
    gather = [EventKind.UNSHARD, EventKind.COPY_IN, EventKind.ALL_GATHER]
    unpack = [EventKind.WAIT]
    assert of_block == [
        EventKind.PRE_FORWARD,
        *gather,
        *unpack,
        EventKind.POST_FORWARD,
        EventKind.RESHARD,
        EventKind.PREFETCH,
        *gather,
        EventKind.PRE_BACKWARD,
        *unpack,
        EventKind.POST_BACKWARD,
        EventKind.RESHARD,
        EventKind.REDUCE,
        EventKind.COPY_IN,
        EventKind.REDUCE_SCATTER,
        EventKind.REDUCE_DONE,
    ]
    assert {event.rank for event in log.events} == {dist.get_rank()}


@distributed(2)
def test_an_event_says_how_many_bytes_travelled() -> None:
    net = make_net(ours, blocks=1)
    log = EventLog()
    with observe(log):
        net(batch()).sum().backward()
    numel = sum(param.numel() for param in make_net(None, blocks=1).blocks[0].parameters())
    for kind in (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER):
        for event in log.of(kind):
            if event.name == "blocks.0":  # padding and marks are all that may be added
                assert 4 * numel <= event.nbytes <= 4 * numel + 256


@distributed(2)
def test_statistics_count_what_the_log_lists() -> None:
    net = make_net(ours)
    log, counting = EventLog(), StatisticsObserver()
    with observe(log), observe(counting):
        net(batch()).sum().backward()
    counts = counting.statistics().counts
    assert {kind: counts[kind] for kind in EventKind} == {
        kind: len(log.of(kind)) for kind in EventKind
    }
    assert counts[EventKind.UNSHARD] == 7 and counts[EventKind.REDUCE] == 4


# -- prefetch -------------------------------------------------------------------------------------


@distributed(2)
def test_the_events_of_prefetch_two_deep() -> None:
    net = make_net(ours, prefetch_policy=DepthPrefetch(forward=2, backward=2))
    net(batch()).sum().backward()
    loss = []
    assert events_of(lambda: loss.append(net(batch()).sum())) == [
        "pre_forward root",
        "unshard root",
        "wait root",
        "prefetch 0",
        "unshard 0",
        "prefetch 1",
        "unshard 1",
        "pre_forward 0",
        "wait 0",
        "prefetch 2",
        "unshard 2",
        "post_forward 0",
        "reshard 0",
        "pre_forward 1",
        "wait 1",
        "post_forward 1",
        "reshard 1",
        "pre_forward 2",
        "wait 2",
        "post_forward 2",
        "reshard 2",
        "post_forward root",
    ]
    backward = events_of(loss[0].backward)
    assert [line for line in backward if line.startswith(("prefetch", "pre_backward"))] == [
        "pre_backward root",
        "prefetch 2",
        "prefetch 1",
        "pre_backward 2",
        "prefetch 0",
        "pre_backward 1",
        "pre_backward 0",
    ]


# -- several forwards, dropped outputs ------------------------------------------------------------


@distributed(2)
def test_the_events_of_several_forwards_before_a_backward() -> None:
    net = make_net(ours, blocks=1)
    losses: list[torch.Tensor] = []
    forward = ["pre_forward root", *block_forward("0"), "post_forward root"]
    events = events_of(lambda: losses.extend(net(batch()).sum() for _ in range(2)))
    # the first forward's graph holds the root, but may have died on another rank: gather anew
    again = [forward[0], "reshard root", "unshard root", "wait root", *forward[1:]]
    assert events == [forward[0], "unshard root", "wait root", *forward[1:], *again]
    backward = [
        "pre_backward root",
        "prefetch 0",
        "unshard 0",
        "pre_backward 0",
        "wait 0",
    ]
    # one loss after the other: each backward reduces, as the other forward stays behind
    assert events_of(losses[1].backward) == [
        *backward,
        "post_backward 0",
        "reshard 0",
        "reduce 0",
        "post_backward root",
        "reshard root",
        "reduce root",
        "reduce_done 0",
        "reduce_done root",
    ]
    assert events_of(losses[0].backward)[-6:] == [
        "reduce 0",
        "post_backward root",
        "reshard root",
        "reduce root",
        "reduce_done 0",
        "reduce_done root",
    ]


@distributed(2)
def test_the_events_of_an_output_that_is_dropped() -> None:
    net = make_net(ours, reshard_after_forward=False, blocks=2)
    outputs = [net(batch())]
    events = events_of(outputs.clear)
    assert sorted(events) == ["reshard 0", "reshard 1", "reshard root"]
    default = make_net(ours, blocks=2)
    outputs = [default(batch())]
    assert events_of(outputs.clear) == ["reshard root"], "the rest was resharded after forward"


@distributed(2)
def test_the_events_of_a_part_of_the_output_that_is_dropped() -> None:
    net = make_net(ours, reshard_after_forward=False, blocks=1)
    outputs = [net(batch()), net(batch())]
    assert sorted(events_of(outputs.pop)) == ["reshard 0", "reshard root"]
    assert events_of(lambda: outputs.pop().sum().backward())[-2:] == [
        "reduce_done 0",
        "reduce_done root",
    ]
    assert_all_returned(net)


@distributed(2)
def test_nothing_happens_to_a_model_whose_parameters_are_all_ignored() -> None:
    net = make_net(None, blocks=1)
    for module in (net.blocks[0], net):
        ours(module, ignored_params=set(net.parameters()))
    events = events_of(lambda: net(batch()).sum().backward())
    assert [line for line in events if "unshard" in line or "reduce" in line] == []
