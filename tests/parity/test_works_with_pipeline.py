"""Schedules of ``torch.distributed.pipelining`` over sharded stages give the unsharded gradients.

The schedules test for torch's own class, so they take our stages for ordinary modules. The recipe
of the migration page saves what they save by that test: the stage is gathered once and reduced once
in a step.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)
from torch.distributed.tensor import DTensor

from fullshard.comm import EventKind, StatisticsObserver, observe
from fullshard.sharding import unsharded
from support.modules import Residual
from support.parity.engines import OURS, TORCH, Engine
from support.ranks import cpu_mesh, distributed

MICRO_BATCHES = 4
SCHEDULES: dict[str, tuple[Any, int]] = {  # and how many stages a rank holds
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved 1f1b": (ScheduleInterleaved1F1B, 2),
    "looped bfs": (ScheduleLoopedBFS, 2),
}


def _mesh() -> DeviceMesh:
    return cpu_mesh((2, 2), ("pp", "dp"))


def _stages(count: int) -> list[nn.Sequential]:
    torch.manual_seed(5)
    return [nn.Sequential(Residual(4, 6), Residual(4, 6)) for _ in range(count)]


def _batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2 * step + replica))
    return both[0], both[1]


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _mine(schedule: str) -> dict[int, nn.Sequential]:
    """The stages that this rank holds, by their place, not yet sharded."""
    per_rank = SCHEDULES[schedule][1]
    first = _mesh().get_local_rank("pp")
    return dict(list(enumerate(_stages(2 * per_rank)))[first::2])


def _shard(stages: dict[int, nn.Sequential], engine: Engine) -> None:
    for stage in stages.values():
        for block in stage:
            engine.fully_shard(block, mesh=_mesh()["dp"])
        engine.fully_shard(stage, mesh=_mesh()["dp"])


def _schedule(
    schedule: str, mine: dict[int, nn.Sequential], stage: type[PipelineStage], **options: Any
) -> Any:
    kind, per_rank = SCHEDULES[schedule]
    group = _mesh().get_group("pp")
    stages = [
        stage(part, place, 2 * per_rank, torch.device("cpu"), group=group)
        for place, part in mine.items()
    ]
    return kind(stages if per_rank > 1 else stages[0], MICRO_BATCHES, **options)


def _step(pipeline: Any, mine: dict[int, nn.Sequential], schedule: str, step: int) -> None:
    inputs, targets = _batch(step, _mesh().get_local_rank("dp"))
    last = 2 * SCHEDULES[schedule][1] - 1
    given = {"target": targets, "losses": []} if last in mine else {}
    pipeline.step(*((inputs,) if 0 in mine else ()), **given)


def _assert_gradients(mine: dict[int, nn.Sequential], schedule: str, step: int) -> None:
    """Compares with all stages in a row, unsharded, on the batches of both replicas."""
    plain = _stages(2 * SCHEDULES[schedule][1])
    for replica in range(2):
        inputs, targets = _batch(step, replica)
        (_loss(nn.Sequential(*plain)(inputs), targets) / 2).backward()
    for place, stage in mine.items():
        for param, whole in zip(stage.parameters(), plain[place].parameters(), strict=True):
            assert isinstance(param.grad, DTensor)
            torch.testing.assert_close(param.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize(
    ("schedule", "engine"),
    [*((schedule, OURS) for schedule in SCHEDULES), ("1f1b", TORCH)],
    ids=[*SCHEDULES, "torch's own 1f1b"],
)
@distributed(4)
def test_a_schedule_has_the_gradients_of_the_unsharded_stages(
    schedule: str, engine: Engine
) -> None:
    mine = _mine(schedule)
    _shard(mine, engine)
    pipeline = _schedule(schedule, mine, PipelineStage, loss_fn=_loss)
    for step in range(2):
        for stage in mine.values():
            stage.zero_grad()
        _step(pipeline, mine, schedule, step)
        _assert_gradients(mine, schedule, step)


class ReduceLast(PipelineStage):
    """Reduces in the last of a step's backwards only."""

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        module: Any = self.submod
        module.set_requires_gradient_sync(kwargs.get("last_backward", False))
        super().backward_one_chunk(*args, **kwargs)


@pytest.mark.parametrize("schedule", SCHEDULES)
@distributed(4)
def test_a_stage_is_gathered_once_and_reduced_once_in_a_step_if_asked(schedule: str) -> None:
    mine = _mine(schedule)
    _shard(mine, OURS)
    for stage in mine.values():  # the first step begins with a backward to learn shapes
        stage.set_requires_gradient_sync(False)  # type: ignore[operator]  # sharded now
    pipeline = _schedule(
        schedule,
        mine,
        ReduceLast,
        loss_fn=lambda output, target: _loss(output, target) / MICRO_BATCHES,
        scale_grads=False,
    )
    for step in range(2):
        for stage in mine.values():
            stage.zero_grad()
        observer = StatisticsObserver()
        with observe(observer), ExitStack() as unsharding:
            for stage in mine.values():
                unsharding.enter_context(unsharded(stage))
            _step(pipeline, mine, schedule, step)
        counts = observer.statistics().counts
        blocks = 2 * len(mine)
        assert counts[EventKind.ALL_GATHER] == blocks
        assert counts[EventKind.REDUCE_SCATTER] == blocks
        _assert_gradients(mine, schedule, step)
