"""A user's own contestants, models and collectives, some of them wrong on purpose."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import DefaultAllGather
from fullshard.sharding import FSDPModule
from fullshard_bench import Trainee, Workload
from fullshard_bench.contestants.plain import build_none, build_reference
from fullshard_bench.contestants.sharded import build_fullshard
from fullshard_bench.launching.arena import Arena
from fullshard_bench.models.workload import Shape
from fullshard_bench.settings import Settings


def right(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The unsharded model on all ranks' batches."""
    return build_reference(workload, settings, arena)


def doubled(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """Gradients of twice the size: AdamW and clipping hide them from the losses."""
    trainee = build_reference(workload, settings, arena)

    def average(gradients: Sequence[torch.Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=arena.group)
            gradient *= 2 / arena.size

    trainee.combine = average
    return trainee


def failing(workload: Workload, settings: Settings, arena: Arena) -> NoReturn:
    """Raises on every rank."""
    raise RuntimeError("out of luck")


def waiting(workload: Workload, settings: Settings, arena: Arena) -> NoReturn:
    """Writes its process's number to the pipe that the environment names, and waits for ever."""
    with Path(os.environ["FULLSHARD_TEST_PIPE"]).open("w") as pipe:
        pipe.write(f"{os.getpid()}\n")
    while True:
        signal.pause()


def no_trainee(workload: Workload, settings: Settings, arena: Arena) -> str:
    """Something else than a trainee."""
    return "nothing"


def deaf(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """Each rank trains by itself, and says that they share."""
    trainee = build_none(workload, settings, arena)
    trainee.shares_gradients = True
    return trainee


def forgetful(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """Right until the steps are timed; then it trains no more."""
    trainee = build_reference(workload, settings, arena)
    rate = trainee.optimizer.param_groups[0]["lr"]
    steps = 0

    def stop(*_: object) -> None:
        nonlocal steps
        steps += 1
        trainee.optimizer.param_groups[0]["lr"] = rate if steps <= settings.checked else 0.0

    trainee.optimizer.register_step_pre_hook(stop)
    return trainee


def nearly(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """Gradients half a percent too small: no loss and no norm that is compared shows it."""
    trainee = build_fullshard(workload, settings, arena)
    for module in trainee.model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.005 * arena.size)
    return trainee


class Gather(DefaultAllGather):
    """An all-gather of a user's own."""


def _loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    output: torch.Tensor = model(batch[0])
    return output.square().mean()


def small(shape: Shape) -> Workload:
    """A user's own model, with a buffer, so not for the meta device."""
    return Workload(
        name="small",
        build=lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
        units=lambda model: [model[0]],
        batch=lambda generator: [torch.randn(shape.rows * 4, 6, generator=generator)],
        loss=_loss,
        items=shape.rows * 4,
        item="rows",
    )


def no_workload(shape: Shape) -> int:
    """Something else than a workload."""
    return 3


class NoGather:
    """Can be made and called, and allocates nothing."""

    def __call__(self, *given: object) -> None:
        """Does nothing."""
