"""The contestant `torch`: torch's own `fully_shard`, with the same settings.

Owns the only imports of `torch.distributed.fsdp` outside the tests: it is measured here, and used
nowhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.preflight import recompute_units
from fullshard_bench.contestants.fsdp_options import fsdp_options
from fullshard_bench.contestants.training import (
    Stopwatch,
    Trainee,
    empty_model,
    make_optimizer,
    materialise,
)
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.arena import Arena
from fullshard_bench.models.workload import Workload
from fullshard_bench.settings import Settings

__all__ = ["build_torch", "check_torch"]


def check_torch() -> None:
    """Raise before any rank starts if this torch has no `fully_shard`.

    Raises:
        BenchError: it has none.
    """
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401  # whether it is there
    except ImportError as error:
        raise BenchError(
            f"--impl torch: torch {torch.__version__} has no torch.distributed.fsdp.fully_shard;"
            " leave torch out"
        ) from error


def build_torch(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The `fully_shard` of torch on every unit, then on the model, with its defaults."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = empty_model(workload, arena.device, settings.seed)
    units = list(workload.units(model))
    shapes = [tuple(each.shape) for each in model.parameters()]
    if settings.checkpointing:
        recompute_units(units)
    options = _options(settings, arena)
    watch = Stopwatch()
    with watch.running():
        for unit in units:
            fully_shard(unit, mesh=arena.mesh, **options)
        fully_shard(model, mesh=arena.mesh, **options)
        if workload.on_meta:
            home = torch.device("cpu") if settings.offload else arena.device
            model.to_empty(device=home)
    if settings.prefetch >= 0:
        _set_prefetch(units, settings.prefetch)
    materialise(model, workload, settings, arena.device, real=not arena.silent)
    owned = list(model.parameters())

    def clip() -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(owned, settings.clip)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    return Trainee(
        model=model,
        workload=workload,
        optimizer=make_optimizer(owned),
        clip=clip if settings.clip else None,
        groups=sum(isinstance(module, FSDPModule) for module in model.modules()),
        padding_percent=_padding_percent(shapes, arena.mesh.size(arena.mesh.ndim - 1)),
        construction_s=watch.seconds,
    )


def _options(settings: Settings, arena: Arena) -> dict[str, Any]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    return fsdp_options(settings, arena.device, MixedPrecisionPolicy, CPUOffloadPolicy)


def _set_prefetch(units: list[nn.Module], depth: int) -> None:
    """Set the units that are gathered ahead of each unit, forward and backward."""
    modules: list[Any] = list(units)
    for index, unit in enumerate(modules):
        unit.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + depth])
        before = modules[max(index - depth, 0) : index]
        unit.set_modules_to_backward_prefetch(before[::-1])


def _padding_percent(shapes: list[tuple[int, ...]], shards: int) -> float:
    """Return torch's padding: rows of each parameter, to a multiple of the ranks that shard."""
    full = padded = 0
    for shape in shapes:
        rows, rest = shape[0], torch.Size(shape[1:]).numel()
        full += rows * rest
        padded += -(-rows // shards) * shards * rest
    return 100 * (padded - full) / full
