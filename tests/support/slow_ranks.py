"""A training run whose every phase can be delayed: on a clock of its own, or in earnest.

``train`` calls ``delay(phase, module)`` in each phase of each step; a test's ``delay`` advances a
``Clock``, or sleeps on one rank.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm import file_access
from fullshard.insight import Phase, SlowRanks, SlowRanksReport
from fullshard.sharding import fully_shard
from support.ranks import cpu_mesh

__all__ = ["BLOCKS", "Case", "Clock", "Delay", "Net", "build", "run_case", "train"]

Delay = Callable[[Phase, str], None]
BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


class Clock:
    def __init__(self) -> None:
        self.ns = 1

    def __call__(self) -> int:
        return self.ns

    def pass_ms(self, ms: float) -> None:
        self.ns += round(ms * 1e6)


class Block(nn.Module):
    """A block that is delayed in its forward and in its backward."""

    def __init__(self, name: str, width: int, delay: Delay) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.name = name
        self.delay = delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        self.delay(Phase.FORWARD, self.name)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.delay(Phase.BACKWARD, self.name))
        return cast(torch.Tensor, x + self.second(hidden))


class Net(nn.Module):
    def __init__(self, width: int, delay: Delay) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(name, width, delay) for name in BLOCKS)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return cast(torch.Tensor, self.head(x))


class DelayedSGD(torch.optim.SGD):
    delay: Delay

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.delay(Phase.OPTIMIZER, "step")
        return super().step(closure)


def build(delay: Delay, *, width: int = 8, mesh: DeviceMesh | None = None, **how: Any) -> Any:
    torch.manual_seed(0)
    net = Net(width, delay)
    for block in net.blocks:
        fully_shard(block, mesh=mesh or cpu_mesh(), **how)
    return fully_shard(net, mesh=mesh or cpu_mesh(), **how)


def train(net: Any, delay: Delay, steps: int, *, rows: int = 4, accumulate: int = 1) -> None:
    """Train, with an access to files after each step."""
    optimizer = DelayedSGD(net.parameters(), lr=1e-3)
    optimizer.delay = delay
    width = net.head.in_features
    for _ in range(steps):
        for micro in range(accumulate):
            delay(Phase.INPUT, "")
            net.set_requires_gradient_sync(micro == accumulate - 1)
            net(torch.ones(rows, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with file_access("checkpoint"):
            delay(Phase.FILES, "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A delay of one rank: in a phase and a module of it, by a part of a step."""

    rank: int
    phase: Phase
    module: str
    share: float

    @classmethod
    def drawn(cls, draw: random.Random, world_size: int) -> Case:
        phase = draw.choice(list(Phase))
        in_block = phase in (Phase.FORWARD, Phase.BACKWARD)
        module = draw.choice(BLOCKS) if in_block else ""
        rank, share = draw.randrange(world_size), draw.uniform(0.2, 1.0)
        return cls(rank=rank, phase=phase, module=module, share=share)


def run_case(case: Case | None, rank: int, steps: int, step_seconds: float) -> SlowRanksReport:
    """Train with a delay that the clock on the wall sees, and compare the ranks."""

    def delay(phase: Phase, module: str) -> None:
        here = case is not None and (case.rank, case.phase) == (rank, phase)
        if case is not None and here and case.module in ("", module):
            time.sleep(case.share * step_seconds)  # the delay is what is tested

    net = build(delay, width=192)
    train(net, delay, 3, rows=64)
    with SlowRanks() as watch:
        train(net, delay, steps, rows=64)
    return watch.report()


def usual_step(rank: int) -> float:
    """Return the median seconds of a step of ``run_case`` without a delay."""
    return run_case(None, rank, 15, 0.0).step_seconds
