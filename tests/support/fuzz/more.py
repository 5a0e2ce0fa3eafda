"""What else a user's program does, drawn at random: a third way to run a seed.

They are: ``GradScaler``, closures, graphs that backward goes through twice, averages of weights,
interrupts, new parameters in the place of others, settings that change between micro-batches,
objects that layers fill, blocks with full parameters, and outcomes that are kept.

Owns ``MoreCase``, its draws, and the averages of both runs. A seed names the same run without them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from fullshard.optim import ExponentialMovingAverage
from support.fuzz.around import (
    MORE_BEFORE,
    MORE_BETWEEN,
    AroundCase,
    Norm,
    draw_around,
    is_reentrant,
)
from support.fuzz.blocks import NO_BLOCKS, BlocksCase, draw_blocks
from support.fuzz.carried import NOT_CARRIED, CarriedCase, Entries, draw_carried, empty, entries_of
from support.fuzz.case import FuzzCase
from support.fuzz.model import inputs_of

__all__ = [
    "DECAY",
    "PLAIN",
    "Averages",
    "Kept",
    "Loss",
    "MoreCase",
    "Outcome",
    "Program",
    "draw_more",
]

DECAY = 0.7


class Loss(Enum):
    """What becomes of the loss of a micro-batch."""

    ONCE = "once"
    TWICE = "twice"  # backward goes through one graph twice
    PENALTY = "penalty"  # on the gradient of the input: a backward of a backward


class Kept(Enum):
    """What stays alive of each forward, until the run ends."""

    NOTHING = "nothing"
    LOSS = "the loss"
    OUTPUT = "the output"
    ALL = "all of it"


@dataclass(frozen=True, kw_only=True)
class MoreCase:
    """What else a program does.

    Attributes:
        overflows: for each step the rank of which the loss is infinite, or -1; None: no scaler.
        closure: whether the optimizer's step calls a closure that runs the backwards.
        losses: for each step, what becomes of the loss of each micro-batch.
        averages: whether averages of the weights are kept.
        carried: what forwards get besides their inputs.
        blocks: blocks with full parameters.
        kept: what stays alive.
    """

    overflows: tuple[int, ...] | None = None
    closure: bool = False
    losses: tuple[tuple[Loss, ...], ...] = ()
    averages: bool = False
    carried: CarriedCase = NOT_CARRIED
    blocks: BlocksCase = NO_BLOCKS
    kept: Kept = Kept.NOTHING

    def loss(self, step: int, micro: int) -> Loss:
        """Return what becomes of a loss."""
        return self.losses[step][micro] if self.losses else Loss.ONCE

    def overflows_in(self, step: int) -> bool:
        """Whether the gradients of a step are not finite, so that the step is skipped."""
        return self.overflows is not None and self.overflows[step] >= 0


PLAIN = MoreCase()


def draw_more(case: FuzzCase) -> tuple[AroundCase, MoreCase]:
    """Draw what is around a run, and what else its program does."""
    rng = random.Random(f"more {case.seed}")
    steps = [len(step.synchronise) for step in case.steps]
    kinds = [Loss.ONCE, Loss.ONCE, Loss.TWICE]
    if any(map(is_reentrant, case.nodes)):
        kinds.remove(Loss.TWICE)  # torch's own frees what the second one needs
    elif not case.canonical:  # in which a backward of a backward may come to a group too late
        kinds.append(Loss.PENALTY)  # autograd.grad, which reentrant checkpointing does not know
    scales = rng.random() < 0.4
    more = MoreCase(
        overflows=tuple(_rank(rng, case) for _ in steps) if scales else None,
        closure=not scales and rng.random() < 0.4,
        losses=tuple(tuple(rng.choice(kinds) for _ in range(count)) for count in steps),
        averages=rng.random() < 0.5,
    )
    around = draw_around(case)
    before = [[*rng.sample(MORE_BEFORE, rng.randint(0, 2))] for _ in steps]
    between = [[rng.choice(MORE_BETWEEN) for _ in range(1, count)] for count in steps]
    for events, step in zip(between, case.steps, strict=True):
        if step.forwards_first:  # of which graphs are alive
            events[:] = ["" for _ in events]
    found = replace(
        around,
        before=tuple(map(tuple, before)),
        between=tuple(map(tuple, between)),
        moves=tuple(way if rng.random() < 0.3 else "" for way in around.moves),
    )
    more = replace(
        more,
        carried=draw_carried(case, casts=around.mixed),
        blocks=draw_blocks(case),
        kept=random.Random(f"kept {case.seed}").choice([*Kept]),
    )
    return _possible(found, more), more


def _rank(rng: random.Random, case: FuzzCase) -> int:
    return rng.randrange(case.world_size) if rng.random() < 0.4 else -1


def _possible(around: AroundCase, more: MoreCase) -> AroundCase:
    """Return what can be around a run whose program does ``more``.

    Args:
        around: what was drawn.
        more: what the program does.
    """
    moved = tuple(_possible(each, more) for each in around.moved)
    around = replace(around, moved=moved, at_rest=not any(more.blocks.before))
    if more.closure or more.overflows is not None:  # neither is beside backward
        around = replace(around, overlaps=tuple(False for _ in around.overlaps))
    # nor is the second backward of a graph, whose groups are stepped by then
    both = zip(around.overlaps, more.losses, strict=True)
    overlaps = tuple(each and losses[-1] is not Loss.TWICE for each, losses in both)
    around = replace(around, overlaps=overlaps)
    if more.overflows is not None:  # who clips looks at gradients that are scaled back
        around = replace(around, norm=Norm.BY_HAND, checks=False)
        first = [*more.overflows, -1].index(-1)  # the first step that is taken
        # torch invents state for an optimizer that has none, and counts a step that was not taken
        moves = [way if at == 0 or at > first else "" for at, way in enumerate(around.moves)]
        around = replace(around, moves=tuple(moves))
    return around


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a forward gave.

    Attributes:
        loss: the loss, from which backward starts.
        out: the output.
        held: what the layers wrote into.
        entries: copies of what was in it after the forward.
    """

    loss: torch.Tensor
    out: torch.Tensor
    held: Any
    entries: Entries

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of all values, by name."""
        # a penalty is in the dtype of the input, which the sharded root casts
        found = {"loss": self.loss.to(self.out.dtype), "output": self.out}
        if not self.loss.isfinite():  # and so it is in both runs, or their names differ
            del found["loss"]
        found.update((f"entry {at}: {name}", each) for at, (name, each) in enumerate(self.entries))
        return {name: each.detach().clone() for name, each in found.items()}

    def names(self) -> list[str]:
        """Return the names of what is in ``held`` now."""
        return [name for name, _ in entries_of(self.held)]


class Program:
    """What a program makes of losses, in both runs."""

    def __init__(self, case: FuzzCase, more: MoreCase) -> None:
        self._case, self.more = case, more
        self._filled: list[Any] = []

    def scaler(self) -> torch.amp.GradScaler:
        """Return a new scaler, which changes nothing if the program has none."""
        scales = self.more.overflows is not None
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=scales)

    def outcome(
        self, model: Any, scaler: torch.amp.GradScaler, rank: int, step: int, micro: int
    ) -> Outcome:
        """Return what a rank's forward gives; the loss with a penalty, or infinite, and scaled."""
        x, skips = inputs_of(self._case, rank, step, micro)
        penalty = self.more.loss(step, micro) is Loss.PENALTY
        dtype = next(model.parameters()).dtype
        x = x.to(dtype).requires_grad_(penalty)
        found = self._run(model, x, skips, self.more.carried.made(dtype))
        loss = found.loss
        if penalty:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        if self.more.overflows is not None and (micro, rank) == (0, self.more.overflows[step]):
            loss = loss * float("inf")
        return replace(found, loss=scaler.scale(loss))

    def _run(self, model: Any, x: torch.Tensor, skips: int, held: Any) -> Outcome:
        carried = self.more.carried
        given, named = carried.arguments(x, held)
        out = model(x, skips, *given, **named)
        held = out if carried.kind == "attribute" else held
        self._filled.append(held)
        entries = entries_of(held)
        loss = out.square().mean()
        for at, (_, value) in enumerate(entries):
            if value.is_floating_point():
                loss = loss + 0.1 / (1 + at) * value.square().mean()
        copies = [(name, value.detach().clone()) for name, value in entries]
        return Outcome(loss=loss, out=out, held=held, entries=copies)

    @torch.no_grad()
    def evaluated(self, model: Any, rank: int, step: int, micro: int) -> Outcome:
        """Return what the second of two forwards gives; both fill one object."""
        x, skips = inputs_of(self._case, rank, step, micro)
        dtype = next(model.parameters()).dtype
        x, held = x.to(dtype), self.more.carried.made(dtype)
        self._run(model, x, skips, held)
        return self._run(model, x, skips, held)

    def end(self) -> None:
        """Empty all objects that layers filled."""
        for held in self._filled:
            empty(held)

    def backward(self, loss: torch.Tensor, step: int, micro: int) -> None:
        """Run the backward of a loss, or run it twice."""
        if self.more.loss(step, micro) is Loss.TWICE:
            loss.backward(retain_graph=True)
        loss.backward()


class Averages:
    """The moving averages of a sharded model's weights, and of the unsharded one's.

    Attributes:
        count: updates so far.
    """

    def __init__(self, model: Any, whole: nn.Module) -> None:
        self._mine = ExponentialMovingAverage(model, DECAY)
        self._whole = [param for param in whole.parameters() if param.requires_grad]
        self._theirs = [param.detach().clone() for param in self._whole]
        self.count = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights into the averages; the first update copies."""
        self._mine.update()
        for average, param in zip(self._theirs, self._whole, strict=True):
            average.lerp_(param, 1 - DECAY if self.count else 1.0)
        self.count += 1

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give both models the averages inside the block."""
        own = [param.detach().clone() for param in self._whole]
        self._write(self._theirs)
        with self._mine.swapped():
            yield
        self._write(own)

    @torch.no_grad()
    def _write(self, values: list[torch.Tensor]) -> None:
        for param, value in zip(self._whole, values, strict=True):
            param.copy_(value)
