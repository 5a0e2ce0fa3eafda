"""`--verify`: whether the run's model trains sharded as it does unsharded, before step 1.

Owns how the run's own task, config and batches become a program for `fullshard.preflight.verify`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.preflight import Verdict, verify
from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import World
from fullshard_train.settings.config import Config
from fullshard_train.task import Task
from fullshard_train.training.optim import build_optimizer
from fullshard_train.training.sharded import shard_model
from fullshard_train.training.trainer import cross_entropy

__all__ = ["require_verified"]

Rows = tuple[torch.Tensor, torch.Tensor]


def require_verified(
    task: Task, config: Config, *, world: World, mesh: DeviceMesh, device: torch.device
) -> Verdict:
    """Train three steps both ways, and return the verdict; the run itself is not touched.

    Raises:
        TrainError: if they differ, with where and why, or if the unsharded model has no room.
    """

    def build() -> nn.Module:
        model = task.build_model()
        task.fill(model, config.train.seed)
        return model.to(device)

    def batch(step: int) -> Rows:
        # As many rows on each rank, since the verdict compares with the mean over ranks.
        each = config.train.batch // (world.size * config.train.accumulate)
        rows = range(world.rank * each, (world.rank + 1) * each)
        found = task.training_rows(step, rows).to(device)
        return found.inputs, found.targets

    def loss(model: nn.Module, rows: Rows) -> torch.Tensor:
        return cross_entropy(model(rows[0]), rows[1], reduction="mean")

    try:
        verdict = verify(
            build,
            lambda model: shard_model(model, task, config, mesh, device),
            batch,
            loss,
            optimizer=lambda params: build_optimizer(params, config.optim),
            aligned_seeds=True,
            seed=config.train.seed,
        )
    except MemoryError as error:
        raise TrainError(f"--verify: {error}; start with smaller model.* settings") from error
    if not verdict.equal:
        raise TrainError(f"--verify: {str(verdict).replace(chr(10), '; ')}")
    return verdict
