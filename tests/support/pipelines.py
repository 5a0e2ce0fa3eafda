"""Pipelines of small stages, for tests of schedules over sharded ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from support.events.recorder import Recorder, record
from support.modules import Residual
from support.parity.engines import OURS, Engine
from support.ranks import cpu_mesh

MICRO_BATCHES = 4
WIDTH = 4

SCHEDULES: dict[str, tuple[Any, Callable[[int], list[int]]]] = {
    "gpipe": (pipelining.ScheduleGPipe, lambda place: [place]),
    "1f1b": (pipelining.Schedule1F1B, lambda place: [place]),
    "interleaved 1f1b": (pipelining.ScheduleInterleaved1F1B, lambda place: [place, place + 2]),
    "looped bfs": (pipelining.ScheduleLoopedBFS, lambda place: [place, place + 2]),
    "zero bubble": (pipelining.ScheduleInterleavedZeroBubble, lambda place: [place, place + 2]),
    "zbv": (pipelining.ScheduleZBVZeroBubble, lambda place: [place, 3 - place]),
    "dual pipe v": (pipelining.ScheduleDualPipeV, lambda place: [place, 3 - place]),
}

"""The schedules, each with the stages that a rank holds, by its place."""

SPLITS = ("zero bubble", "zbv", "dual pipe v")
"""Those that split backward into the gradients of inputs and those of weights."""


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss."""
    return (output - target).square().mean()


def _stages(count: int) -> list[nn.Sequential]:
    torch.manual_seed(5)
    return [nn.Sequential(Residual(WIDTH, 6), Residual(WIDTH, 6)) for _ in range(count)]


def shard_whole(engine: Engine, part: nn.Sequential, mesh: DeviceMesh) -> None:
    """Each block is a group."""
    for block in part:
        engine.fully_shard(block, mesh=mesh)
    engine.fully_shard(part, mesh=mesh)


@dataclass
class Pipeline:
    """Two places in a row; ranks at the same place shard its stages and have batches of their own.

    Attributes:
        name: of the schedule.
        stage: the class of the stages.
        engine: shards them.
        shard: how: given the engine, a stage and the mesh.
        scale: torch divides the gradients by the micro-batches; else the loss does.
        parts: this rank's stages, by their number.
        recorders: what they communicate, from ``record`` on.
    """

    name: str
    stage: type[Any]
    engine: Engine = OURS
    shard: Callable[[Engine, nn.Sequential, DeviceMesh], None] = shard_whole
    scale: bool = True
    parts: dict[int, nn.Sequential] = field(init=False)
    recorders: dict[int, Recorder] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas = dist.get_world_size() // 2
        self.mesh = cpu_mesh((2, self.replicas), ("pp", "dp"))
        self.replica = self.mesh.get_local_rank("dp")
        kind, held = SCHEDULES[self.name]
        mine = held(self.mesh.get_local_rank("pp"))
        self.count = 2 * len(mine)
        self.parts = {number: _stages(self.count)[number] for number in mine}
        for part in self.parts.values():
            self.shard(self.engine, part, self.mesh["dp"])
        stages = [
            self.stage(
                part, number, self.count, torch.device("cpu"), group=self.mesh.get_group("pp")
            )
            for number, part in self.parts.items()
        ]
        if torch.__version__ < "2.13":  # it opens connections to its own rank, too: not with gloo
            for each in stages:
                each._get_init_p2p_neighbors_ops = list
        self.schedule = kind(
            stages if len(stages) > 1 else stages[0],
            MICRO_BATCHES,
            loss_fn=mean_square if self.scale else lambda *both: mean_square(*both) / MICRO_BATCHES,
            scale_grads=self.scale,
        )

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.count - 1 in self.parts

    def record(self) -> None:
        """Begin to record what the stages communicate."""
        self.recorders = {number: record(part) for number, part in self.parts.items()}

    def batch(self, seed: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and the targets of one replica."""
        generator = torch.Generator().manual_seed(2 * seed + replica)
        inputs, targets = torch.randn(2, 2 * MICRO_BATCHES, WIDTH, generator=generator)
        return inputs, targets

    def step(self, seed: int, **options: bool) -> None:
        """A step on the batch of this rank's replica; ``options`` are for the schedule."""
        self._run(partial(self.schedule.step, **options), seed)

    def evaluate(self, seed: int) -> torch.Tensor | None:
        """The outputs, where the last stage is."""
        outputs: torch.Tensor | None = self._run(self.schedule.eval, seed)
        return outputs

    def _run(self, call: Callable[..., Any], seed: int) -> Any:
        inputs, targets = self.batch(seed, self.replica)
        given = {"target": targets, "losses": []} if self.is_last else {}
        return call(*((inputs,) if 0 in self.parts else ()), **given)

    def zero_grad(self) -> None:
        """Forget the gradients of all stages."""
        for part in self.parts.values():
            part.zero_grad()

    def plain(self) -> nn.Sequential:
        """All stages in a row, unsharded, as they begin."""
        return nn.Sequential(*_stages(self.count))

    def wrong(self, *seeds: int) -> list[str]:
        """The parameters whose gradient is not that of the unsharded model on these batches."""
        plain = self.plain()
        for seed in seeds:
            for replica in range(self.replicas):
                inputs, targets = self.batch(seed, replica)
                (mean_square(plain(inputs), targets) / self.replicas).backward()
        return [
            f"{number}.{name}"
            for number, part in self.parts.items()
            for (name, param), whole in zip(
                part.named_parameters(), plain[number].parameters(), strict=True
            )
            if not _is_close(param.grad, whole.grad)
        ]


def _is_close(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    assert wanted is not None
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    return whole is not None and torch.allclose(whole, wanted, rtol=1e-5, atol=1e-6)
