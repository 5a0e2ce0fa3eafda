"""Whole event orders, as an observer sees them: what a step does to every module and group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from fullshard.insight import StatisticsObserver
from fullshard.policies import DepthPrefetch
from support.events.models import DIM, batch, leaf_batch, make_net
from support.events.recorder import (
    Recorder,
    Shard,
    against_torch,
    assert_all_returned,
    assert_gradients_of,
    by_name,
    events_of,
    full_gradients,
    ours,
    record,
    shard_with_torch,
)
from support.modules import Assembled
from support.ranks import distributed
from support.surface.ranks import everyone


def step(net: Any) -> None:
    """One forward and backward."""
    net(leaf_batch()).sum().backward()


def stepped(net: Any) -> tuple[Any, list[Any]]:
    """Return ``net`` after a step, and a list for its outputs."""
    step(net)
    return net, []


# -- a list of modules, which is one group ---------------------------------------------------------


def _pair(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = model.middle(torch.tanh(model.first(x)))
    return torch.tanh(model.last(torch.tanh(x)) if model.runs_last else x)


def make_pair(shard: Shard | None, **options: Any) -> Any:
    """Two linears that are one group, called by the first, around one that is the root's."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(DIM, DIM) for name in ("first", "last", "middle")}
    pair = Assembled(_pair, **layers, runs_last=True)
    if shard is not None:
        shard([pair.first, pair.last], **options)
        shard(pair, **options)
    return pair


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, and the events of its last part.

    Attributes:
        events: lines ``NAME: kinds``, in their order.
        options: of the net.
        make: how it is made.
        first: what runs before the events are watched; ``watched`` gets what it returns.
        watched: what runs then.
        of: the names whose events are compared; none: all.
    """

    events: str
    options: dict[str, Any] = field(default_factory=dict)
    make: Callable[..., Any] = make_net
    first: Callable[[Any], Any] = lambda net: net
    watched: Callable[[Any], object] = step
    of: tuple[str, ...] = ()


def loss_of(net: Any) -> torch.Tensor:
    loss: torch.Tensor = net(leaf_batch()).sum()
    return loss


def two_losses(net: Any) -> list[torch.Tensor]:
    return [net(batch(seed=seed)).sum() for seed in (1, 2)]


PROGRAMS = {
    "a step": Program(
        events="""
            root: pre_forward unshard wait
            0: pre_forward unshard wait post_forward reshard
            1: pre_forward unshard wait post_forward reshard
            2: pre_forward unshard wait post_forward reshard
            root: post_forward
            root: pre_backward
            2: prefetch unshard pre_backward wait
            1: prefetch unshard
            2: post_backward reshard reduce
            1: pre_backward wait
            0: prefetch unshard
            1: post_backward reshard reduce
            0: pre_backward wait post_backward reshard reduce
            root: post_backward reshard reduce
            2: reduce_done
            1: reduce_done
            0: reduce_done
            root: reduce_done
        """
    ),
    "resharded after forward": Program(
        options={"reshard_after_forward": True, "blocks": 1},
        watched=lambda net: net(batch()).sum().backward(),
        events="""
            root: pre_forward unshard wait
            0: pre_forward unshard wait post_forward reshard
            root: post_forward reshard
            root: pre_backward unshard wait
            0: prefetch unshard pre_backward wait post_backward reshard reduce
            root: post_backward reshard reduce
            0: reduce_done
            root: reduce_done
        """,
    ),
    "kept after forward": Program(
        options={"reshard_after_forward": False, "blocks": 1},
        watched=lambda net: net(batch()).sum().backward(),
        events="""
            root: pre_forward unshard wait
            0: pre_forward unshard wait post_forward
            root: post_forward
            root: pre_backward
            0: pre_backward post_backward reshard reduce
            root: post_backward reshard reduce
            0: reduce_done
            root: reduce_done
        """,
    ),
    "a forward with prefetch two deep": Program(
        options={"prefetch_policy": DepthPrefetch(forward=2, backward=2)},
        first=stepped,
        watched=lambda state: state[1].append(state[0](batch())),
        events="""
            root: pre_forward unshard wait
            0: prefetch unshard
            1: prefetch unshard
            0: pre_forward wait
            2: prefetch unshard
            0: post_forward reshard
            1: pre_forward wait post_forward reshard
            2: pre_forward wait post_forward reshard
            root: post_forward
        """,
    ),
    # the first forward's graph holds the root, but may have died on another rank: gather anew
    "several forwards": Program(
        options={"blocks": 1},
        first=lambda net: (net, []),
        watched=lambda state: state[1].extend(two_losses(state[0])),
        events="""
            root: pre_forward unshard wait
            0: pre_forward unshard wait post_forward reshard
            root: post_forward
            root: pre_forward reshard unshard wait
            0: pre_forward unshard wait post_forward reshard
            root: post_forward
        """,
    ),
    # each backward reduces, as the other forward stays behind
    "the backward of one of two forwards": Program(
        options={"blocks": 1},
        first=two_losses,
        watched=lambda losses: losses[1].backward(),
        events="""
            root: pre_backward
            0: prefetch unshard pre_backward wait post_backward reshard reduce
            root: post_backward reshard reduce
            0: reduce_done
            root: reduce_done
        """,
    ),
    "the backward of two forwards": Program(
        options={"blocks": 1},
        first=lambda net: [net(leaf_batch(seed=seed)).sum() for seed in (1, 2)],
        watched=lambda losses: sum(losses).backward(),
        of=("0",),
        events="""
            0: prefetch unshard pre_backward wait post_backward reshard
            0: prefetch unshard pre_backward wait post_backward reshard reduce reduce_done
        """,
    ),
    "the backward of a non-reentrant checkpoint": Program(
        options={"outer": False, "blocks": 1},
        first=loss_of,
        watched=torch.Tensor.backward,
        events="""
            root: pre_backward
            0: prefetch unshard pre_backward wait
            0: pre_forward post_forward
            0: post_backward reshard reduce
            root: post_backward reshard reduce
            0: reduce_done
            root: reduce_done
        """,
    ),
    "a reentrant checkpoint": Program(
        options={"outer": True, "blocks": 1},
        events="""
            root: pre_forward unshard wait
            0: pre_forward unshard wait post_forward reshard
            root: post_forward pre_backward
            0: prefetch unshard pre_forward wait post_forward
            0: pre_backward post_backward reshard reduce
            root: post_backward reshard reduce
            0: reduce_done
            root: reduce_done
        """,
    ),
    "the backward of nested modules in a non-reentrant checkpoint": Program(
        options={"outer": False, "nested": True, "blocks": 1},
        first=loss_of,
        watched=torch.Tensor.backward,
        events="""
            root: pre_backward
            0.down: prefetch unshard
            0: pre_backward
            0.down: pre_backward wait
            0.up: prefetch unshard
            0: pre_forward
            0.up: pre_forward wait post_forward
            0.down: pre_forward post_forward
            0: post_forward
            0.down: post_backward reshard reduce
            0.up: pre_backward post_backward reshard reduce
            root: post_backward reshard reduce
            0.down: reduce_done
            0.up: reduce_done
            root: reduce_done
        """,
    ),
    "a list of modules": Program(
        make=make_pair,
        events="""
            root: pre_forward unshard wait
            first, last: pre_forward unshard wait post_forward
            first, last: pre_forward post_forward reshard
            root: post_forward
            root: pre_backward
            first, last: prefetch unshard pre_backward wait
            first, last: post_backward reshard reduce
            root: post_backward reshard reduce
            first, last: reduce_done
            root: reduce_done
        """,
    ),
}


@pytest.mark.cross
@pytest.mark.parametrize("program", PROGRAMS)
@distributed(2, 4)
def test_a_program_has_these_events_on_every_rank(program: str) -> None:
    row = PROGRAMS[program]
    state = row.first(row.make(ours, **row.options))
    events = events_of(lambda: row.watched(state))
    if row.of:
        events = [line for line in events if line.partition(" ")[2] in row.of]
    assert events == by_name(row.events)
    assert all(each == events for each in everyone(events))


@distributed(2)
def test_the_second_step_has_the_events_of_the_first() -> None:
    net = make_net(ours)
    first, second = (events_of(lambda: step(net)) for _ in range(2))
    assert first == second


@distributed(2)
def test_groups_return_when_the_last_output_that_needs_them_is_dropped() -> None:
    outputs = [make_net(ours, reshard_after_forward=False, blocks=2)(batch())]
    assert sorted(events_of(outputs.clear)) == ["reshard 0", "reshard 1", "reshard root"]
    outputs = [make_net(ours, blocks=2)(batch())]
    assert events_of(outputs.clear) == ["reshard root"], "the rest was resharded after forward"
    net = make_net(ours, reshard_after_forward=False, blocks=1)
    outputs = [net(batch()), net(batch())]
    assert sorted(events_of(outputs.pop)) == ["reshard 0", "reshard root"]
    outputs.pop().sum().backward()
    assert_all_returned(net)


@distributed(2)
def test_nothing_happens_to_a_model_whose_parameters_are_all_ignored() -> None:
    net = make_net(None, blocks=1)
    for module in (net.blocks[0], net):
        ours(module, ignored_params=set(net.parameters()))
    events = events_of(lambda: step(net))
    assert [line for line in events if "unshard" in line or "reduce" in line] == []


# -- events of bytes ------------------------------------------------------------------------------


@distributed(2)
def test_the_events_of_bytes_stand_between_those_of_the_group() -> None:
    net = make_net(ours, blocks=1)
    log, counting = EventLog(), StatisticsObserver()
    with observe(log), observe(counting):
        net(batch()).sum().backward()
    of_block = [event.kind for event in log.events if event.name == "blocks.0"]
    # ranks of one host share memory: what is gathered in place is not unpacked
    gather = [EventKind.UNSHARD, EventKind.COPY_IN, EventKind.ALL_GATHER]
    assert of_block == [
        EventKind.PRE_FORWARD,
        *gather,
        EventKind.WAIT,
        EventKind.POST_FORWARD,
        EventKind.RESHARD,
        EventKind.PREFETCH,
        *gather,
        EventKind.PRE_BACKWARD,
        EventKind.WAIT,
        EventKind.POST_BACKWARD,
        EventKind.RESHARD,
        EventKind.REDUCE,
        EventKind.COPY_IN,
        EventKind.REDUCE_SCATTER,
        EventKind.REDUCE_DONE,
    ]
    assert {event.rank for event in log.events} == {dist.get_rank()}
    numel = sum(param.numel() for param in make_net(None, blocks=1).blocks[0].parameters())
    for kind in (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER):
        for event in log.of(kind):
            if event.name == "blocks.0":  # padding and marks are all that may be added
                assert 4 * numel <= event.nbytes <= 4 * numel + 256
    counts = counting.statistics().counts
    assert {kind: counts[kind] for kind in EventKind} == {
        kind: len(log.of(kind)) for kind in EventKind
    }
    assert counts[EventKind.UNSHARD] == 3 and counts[EventKind.REDUCE] == 2


# -- groups of several modules --------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["plain-input", "grad-input"])
@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_a_list_of_modules_gathers_and_reduces_as_torchs(reshard: bool | None, grad: bool) -> None:
    def run(pair: Any, recorder: Recorder) -> None:
        for _ in range(2):
            pair(batch(requires_grad=grad)).square().sum().backward()

    mine, theirs = against_torch(run, make=make_pair, reshard_after_forward=reshard)
    assert sorted(mine.recorder.reductions) == sorted(theirs.recorder.reductions)


def _listed(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.tail(torch.tanh(model.first(model.head(x))))


def make_listed(shard: Shard, **options: Any) -> Any:
    """Two linears that are one group, of which the second never runs, between two others."""
    torch.manual_seed(0)
    names = ("head", "first", "unused", "tail")
    model = Assembled(_listed, **{name: nn.Linear(DIM, DIM) for name in names})
    for part in (model.head, [model.first, model.unused], model.tail, model):
        shard(part, **options)
    return model


@pytest.mark.parametrize("reshard", [True, None])
@distributed(2)
def test_a_list_of_which_one_module_does_not_run_is_gathered_ahead_in_backward(
    reshard: bool | None,
) -> None:
    """As often as by torch's own, which counts such a list as the last that ran.

    So torch's own gathers it before the modules that ran after it, and is not compared in that.
    torch 2.11 does not reshard such a list after forward, and gathers it once.
    """
    gathers = []
    for shard in (ours, shard_with_torch):
        model = make_listed(shard, reshard_after_forward=reshard)
        recorder = record(model)
        for _ in range(2):
            recorder.clear()
            step(model)
        gathers.append(recorder.gathers)
    forward, backward = ["head", "first", "tail"], ["tail", "first", "head"]
    assert gathers[0] == [*forward, *backward]
    counted = [sorted([*forward, *again]) for again in (backward, ["tail", "head"])]
    assert sorted(gathers[1]) in counted
    events = events_of(loss_of(make_listed(ours, reshard_after_forward=reshard)).backward)
    ahead = [line for line in events if line.startswith("prefetch")]
    assert ahead == ["prefetch first, unused", "prefetch head"]


@distributed(2)
def test_a_list_of_which_one_module_does_not_run_is_resharded_and_reduced_all_the_same() -> None:
    pair = make_pair(ours)
    for runs_last in (False, True, False):
        pair.runs_last = runs_last
        pair.zero_grad()
        recorder = record(pair)
        step(pair)
        assert_all_returned(pair)
        assert recorder.reductions == ["first", "root"]
        gradients = full_gradients(pair)
        assert (gradients["last.weight"] is not None) == runs_last


@distributed(2)
def test_a_group_used_only_through_a_tied_weight_is_returned_and_reduced() -> None:
    def tied_model() -> Any:
        torch.manual_seed(0)
        embedding, head = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        head.weight = embedding.weight
        return Assembled(lambda m, x: torch.tanh(m.head(x)), embedding=embedding, head=head)

    plain, tied = tied_model(), tied_model()
    for module in (tied.embedding, tied.head, tied):
        ours(module)
    for model in (plain, tied):
        for _ in range(2):
            model(batch()).sum().backward()
    assert_gradients_of(tied, plain)
