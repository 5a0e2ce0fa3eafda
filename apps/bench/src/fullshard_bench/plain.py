"""The contestants that hold the whole model on each rank: the unsharded step, and DDP.

Owns also the reference that losses are compared with: the unsharded model trained on all ranks'
batches, its gradients averaged one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullshard.preflight import recompute_units
from fullshard_bench.arena import Arena
from fullshard_bench.settings import Settings
from fullshard_bench.training import (
    MasterWeights,
    Stopwatch,
    Trainee,
    empty_model,
    make_optimizer,
    materialise,
)
from fullshard_bench.workload import Workload

__all__ = ["build_ddp", "build_none", "build_reference"]


def build_none(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The plain model: each rank trains its own model on its own batch, without communication."""
    model, masters = _whole_model(workload, settings, arena)
    trainee = _trainee(model, model, masters, workload, settings)
    trainee.shares_gradients = False
    return trainee


def build_reference(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The plain model trained on the batches of all ranks: the definition of right."""
    model, masters = _whole_model(workload, settings, arena)
    trainee = _trainee(model, model, masters, workload, settings)

    def average(gradients: Sequence[torch.Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=arena.group)
            gradient /= arena.size

    trainee.combine = average
    return trainee


def build_ddp(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """DistributedDataParallel with its defaults."""
    model, masters = _whole_model(workload, settings, arena)
    watch = Stopwatch()
    with watch.running():
        wrapped = DistributedDataParallel(
            model, process_group=arena.group, init_sync=not arena.silent
        )
    trainee = _trainee(wrapped, model, masters, workload, settings)
    trainee.construction_s = watch.seconds
    return trainee


def _whole_model(
    workload: Workload, settings: Settings, arena: Arena
) -> tuple[nn.Module, MasterWeights | None]:
    model = empty_model(workload, arena.device, settings.seed)
    materialise(model, workload, settings, arena.device, real=not arena.silent)
    masters = None
    if settings.dtype != "float32":
        masters = MasterWeights(model, getattr(torch, settings.dtype))
    if settings.checkpointing:
        recompute_units(workload.units(model))
    return model, masters


def _trainee(
    called: nn.Module,
    model: nn.Module,
    masters: MasterWeights | None,
    workload: Workload,
    settings: Settings,
) -> Trainee:
    owned = list(model.parameters()) if masters is None else masters.masters

    def clip() -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(owned, settings.clip)

    return Trainee(
        model=called,
        workload=workload,
        optimizer=make_optimizer(owned),
        clip=clip if settings.clip else None,
        masters=masters,
    )
