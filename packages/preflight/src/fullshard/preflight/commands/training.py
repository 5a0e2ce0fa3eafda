"""A user's program as a training run: planned, and watched for races."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fullshard.preflight.commands.user_program import accepted, batch_of_step
from fullshard.preflight.planning.plan import plan
from fullshard.preflight.planning.report import Plan
from fullshard.preflight.races.report import RaceReport
from fullshard.preflight.races.watch import check
from fullshard.preflight.verification.program import adamw

__all__ = ["planned", "raced"]


def planned(
    program: Mapping[str, Any], mesh: tuple[int, ...], micro_batches: int, device: str | None
) -> Plan:
    """Return the plan of one rank of a program in a world of the given mesh."""
    given = accepted(plan, program) | {"batch": lambda: batch_of_step(program["batch"], 0)}
    given |= {"mesh": _world(mesh), "device": device}
    return plan(**{"micro_batches": micro_batches, **given})


def raced(program: Mapping[str, Any], mesh: tuple[int, ...], *, steps: int) -> RaceReport:
    """Return the races of a program on simulated streams."""

    def train(world: DeviceMesh) -> None:
        model = program["build_model"]()
        shard = program["shard"]
        takes_mesh = "mesh" in inspect.signature(shard).parameters
        model = (shard(model, mesh=world) if takes_mesh else shard(model)) or model
        optimizer = program.get("optimizer", adamw)(model.parameters())
        for step in range(steps):
            program["loss"](model, batch_of_step(program["batch"], step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return check(train, mesh=_world(mesh))


def _world(mesh: tuple[int, ...]) -> Any:
    return mesh[0] if len(mesh) == 1 else mesh
