"""What a step gathers and reduces, beside torch's own, and when (DESIGN 3.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.comm import EventKind, EventLog, observe
from support.events.models import DIM, batch, make_net, step
from support.events.recorder import (
    STEP,
    Recorder,
    Shard,
    against_torch,
    assert_gradients_of,
    gathered,
    ours,
    record,
)
from support.modules import Assembled
from support.products import few
from support.ranks import distributed

# -- programs beside torch ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, whose gathers, reductions and gradients are torch's.

    Attributes:
        run: gets the net and the recorder.
        gathers: by ``reshard_after_forward``, the names of what is gathered, or their number.
        reductions: the names of what is reduced.
        options: of the net.
    """

    run: Callable[[Any, Recorder], object]
    gathers: dict[bool | None, str | int]
    reductions: str = "2 1 0 root"
    options: dict[str, Any] = field(default_factory=dict)


def second_step(net: Any, recorder: Recorder) -> None:
    step(net)
    recorder.clear()
    step(net)


def accumulate(net: Any, recorder: Recorder, *, keep: bool = False) -> None:
    """Three micro-batches, of which the last communicates."""
    for microbatch in range(3):
        last = microbatch == 2
        net.set_requires_gradient_sync(last)
        net.set_is_last_backward(last)
        net.set_reshard_after_backward(last or not keep)
        step(net, seed=microbatch)
        assert last or recorder.reductions == []


def drop_an_output(net: Any, recorder: Recorder) -> None:
    output = net(batch(seed=9))
    del output
    net.reshard()  # torch keeps what only the root holds
    recorder.clear()
    step(net)


def two_forwards(net: Any, recorder: Recorder) -> None:
    (net(batch(seed=1)).sum() + net(batch(seed=2)).square().sum()).backward()


def retain(net: Any, recorder: Recorder) -> None:
    loss = net(batch()).square().sum()
    loss.backward(retain_graph=True)
    recorder.clear()
    loss.backward()


def evaluate(net: Any, recorder: Recorder) -> None:
    with torch.no_grad():
        for _ in range(3):
            net(batch())
    step(net)


def two_steps(net: Any, recorder: Recorder) -> None:
    for seed in range(2):
        step(net, seed=seed)


def freeze(net: Any, recorder: Recorder) -> None:
    net.blocks[1].requires_grad_(False)
    step(net)


def prefetch_forward(net: Any, recorder: Recorder) -> None:
    net.set_modules_to_forward_prefetch([net.blocks[1], net.blocks[0]])
    net.blocks[0].set_modules_to_forward_prefetch([net.blocks[1], net.blocks[2]])
    step(net)


def prefetch_backward(net: Any, recorder: Recorder) -> None:
    net.set_modules_to_backward_prefetch([net.blocks[1], net.blocks[2]])
    net.blocks[2].set_modules_to_backward_prefetch([net.blocks[0]])
    step(net)


def prefetch_of_one_module(net: Any, recorder: Recorder) -> None:
    """A list replaces the policy of its module only."""
    net.blocks[2].set_modules_to_backward_prefetch([net.blocks[0]])
    step(net)


PROGRAMS = {
    "a step": Program(
        run=lambda net, _: step(net), gathers={None: STEP, True: 8, False: "root 0 1 2"}
    ),
    "a second step": Program(run=second_step, gathers={None: STEP, True: 8, False: "root 0 1 2"}),
    "accumulation": Program(run=accumulate, gathers={None: f"{STEP} {STEP} {STEP}", True: 24}),
    "accumulation, resharded once": Program(
        run=lambda *args: accumulate(*args, keep=True),
        gathers={None: f"{STEP} 2 1 0 2 1 0", True: 16, False: "root 0 1 2"},
    ),
    "accumulation with communication": Program(
        run=two_steps,
        gathers={None: f"{STEP} {STEP}", True: 16, False: "root 0 1 2 root 0 1 2"},
        reductions="2 1 0 root 2 1 0 root",
    ),
    "a dropped output": Program(run=drop_an_output, gathers={None: STEP}),
    "two forwards": Program(run=two_forwards, gathers={True: 14}),
    "a retained graph": Program(run=retain, gathers={None: "root 2 1 0", True: 4, False: 4}),
    "an evaluation": Program(
        run=evaluate,
        gathers={None: f"root 0 1 2 0 1 2 0 1 2 {STEP[5:]}", True: 20, False: "root 0 1 2"},
    ),
    "a frozen group": Program(run=freeze, gathers={None: STEP}, reductions="2 0 root"),
    "prefetch in forward": Program(run=prefetch_forward, gathers={None: "root 1 0 2 2 1 0"}),
    "prefetch in backward": Program(run=prefetch_backward, gathers={None: "root 0 1 2 1 2 0"}),
    "prefetch of one module": Program(
        run=prefetch_of_one_module, gathers={None: "root 0 1 2 2 0 1"}
    ),
}


@pytest.mark.cross
@pytest.mark.parametrize(
    ("name", "reshard"),
    few(
        [(name, reshard) for name, program in PROGRAMS.items() for reshard in program.gathers],
        *((name, next(iter(program.gathers))) for name, program in PROGRAMS.items()),
        *(("a step", reshard) for reshard in PROGRAMS["a step"].gathers),
        together=True,
    ),
)
@distributed(2, 4, matrix=[4])
def test_a_program_gathers_and_reduces_as_torchs(name: str, reshard: bool | None) -> None:
    program = PROGRAMS[name]
    mine, theirs = against_torch(program.run, reshard_after_forward=reshard, **program.options)
    wanted = program.gathers[reshard]
    if isinstance(wanted, str):
        assert mine.recorder.gathers == gathered(wanted)
    else:
        assert len(mine.recorder.gathers) == wanted
    assert mine.recorder.reductions == gathered(program.reductions)
    assert sorted(mine.recorder.reductions) == sorted(theirs.recorder.reductions)


# -- when -----------------------------------------------------------------------------------------


@distributed(2)
def test_gradients_of_a_backward_that_is_not_the_last_appear_with_the_last() -> None:
    net = make_net(ours)
    log = EventLog()
    with observe(log):
        net.set_is_last_backward(False)
        step(net, seed=0)
        assert log.named(EventKind.REDUCE_DONE) == []
        net.set_is_last_backward(True)
        step(net, seed=1)
    assert len(log.named(EventKind.REDUCE_DONE)) == len(log.named(EventKind.REDUCE)) == 8
    plain = make_net(None)
    for seed in (0, 1):
        step(plain, seed=seed)
    assert_gradients_of(net, plain)


@distributed(2)
def test_groups_reached_for_some_uses_only_reduce_at_the_end_in_reverse_first_forward_order() -> (
    None
):
    net = make_net(ours)
    log = EventLog()
    losses = [net(batch(seed=seed, requires_grad=True)).square().sum() for seed in (1, 2)]
    with observe(log):
        losses[1].backward()
    assert log.named(EventKind.REDUCE) == ["blocks.2", "blocks.1", "blocks.0", "(root)"]
    kinds = [event.kind for event in log.of(EventKind.POST_BACKWARD, EventKind.REDUCE)]
    assert kinds == [EventKind.POST_BACKWARD] * 4 + [EventKind.REDUCE] * 4
    log.clear()
    with observe(log):
        losses[0].backward()
    kinds = [event.kind for event in log.of(EventKind.POST_BACKWARD, EventKind.REDUCE)]
    assert kinds == [EventKind.POST_BACKWARD, EventKind.REDUCE] * 4, "nothing is outstanding now"
    plain = make_net(None)
    for seed in (1, 2):
        step(plain, seed=seed)
    assert_gradients_of(net, plain)


def _fork() -> Any:
    """Two branches, sharded each by itself, and a stem that belongs to the root."""

    def both(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(m.stem(x))
        return torch.tanh(m.left(x)), torch.tanh(m.right(x))

    return Assembled(both, **{name: nn.Linear(DIM, DIM) for name in ("stem", "left", "right")})


def make_fork(shard: Shard | None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    fork = _fork()
    if shard is not None:
        for module in (fork.left, fork.right, fork):
            shard(module, **arguments)
    return fork


@pytest.mark.parametrize("reshard", [True, False, None])
@distributed(2)
def test_a_group_that_backward_does_not_reach_is_not_reduced(reshard: bool | None) -> None:
    def run(fork: Any, recorder: Recorder) -> None:
        left, _ = fork(batch())
        left.sum().backward()

    mine, theirs = against_torch(run, make=make_fork, reshard_after_forward=reshard)
    assert sorted(mine.recorder.reductions) == sorted(theirs.recorder.reductions)
    assert mine.recorder.reductions == ["left", "root"]
    assert mine.gradients["right.weight"] is None


@distributed(2)
def test_a_graph_that_backward_left_in_part_can_be_finished_later() -> None:
    fork, plain = make_fork(ours), make_fork(None)
    recorder = record(fork)
    for model in (fork, plain):
        left, right = model(batch(requires_grad=True))
        left.sum().backward(retain_graph=True)
        right.square().sum().backward()
    assert recorder.reductions == ["left", "root", "right", "root"]
    assert_gradients_of(fork, plain)
