"""`--check-config`: whether a run would begin, and every setting with where its value came from.

Owns the order of the checks and the printed form, which is TOML. Refuses to change anything: no
folder is made, no file written, nothing is trained.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

import torch

from fullshard_train.commands.plan import Plan, require_room
from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import World, choose_device, on_main, require_rows
from fullshard_train.settings.config import (
    Config,
    default_table,
    override_table,
    read_table,
    to_toml,
)
from fullshard_train.tasks import load_task

__all__ = ["check", "origins"]


def origins(options: argparse.Namespace, plan: Plan) -> dict[str, str]:
    """Where the value of each setting, by `section.name`, came from."""
    layers: list[tuple[str, Mapping[str, Mapping[str, object]]]] = [
        ("default.toml", default_table())
    ]
    if plan.position is not None:
        layers.append((f"checkpoint {plan.checkpoint}", plan.position.config))
    layers += [(str(path), read_table(path)) for path in options.config]
    layers.append(("command line", override_table(options.set)))
    found = {
        f"{section}.{name}": where
        for where, table in layers
        for section, settings in table.items()
        for name in settings
    }
    if not override_table(options.set).get("run", {}).get("directory"):
        configured = found["run.directory"] not in ("default.toml", "command line")
        found["run.directory"] = found["run.directory"] if configured else "date and time"
    return found


def check(plan: Plan, world: World) -> str:
    """The lines to print, when everything that can be known before training is right.

    Without torchrun, a run on `parallel.mesh` ranks is meant.

    Raises:
        TrainError: on every rank, for the first thing that is wrong.
    """
    config = plan.config
    ranks = math.prod(config.parallel.sizes(1)) if world.size == 1 else world.size
    require_rows(config, ranks)
    device = choose_device(config, world)
    on_main(lambda: require_room(plan))
    task = load_task(config, world)
    if plan.position is not None and plan.position.fingerprint != task.fingerprint:
        raise TrainError(
            f"resume {plan.checkpoint}: it was trained on other data; give the same --data"
        )
    with torch.device("meta"):
        model = task.build_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    begins = "from the beginning" if plan.position is None else f"from step {plan.position.step}"
    return "\n".join(
        [
            _annotated(config, plan.origins),
            f"# model  {parameters:,} parameters, over {ranks} rank(s) on {device.type}",
            f"# data   {task.data_is}",
            f"# run    {plan.folder.root}, {begins} to step {config.train.steps}",
            *([f"# warning {plan.rate_rises}"] if plan.rate_rises else []),
            "# right: nothing was written",
        ]
    )


def _annotated(config: Config, where: Mapping[str, str]) -> str:
    """The config as TOML, with the origin behind each line."""
    lines, section = [], ""
    for line in to_toml(config).splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        name = line.partition(" = ")[0]
        origin = where.get(f"{section}.{name}")
        lines.append(line if origin is None else f"{line:<40}  # {origin}")
    return "\n".join(lines)
