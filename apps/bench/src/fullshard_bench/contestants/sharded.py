"""The contestant `fullshard`: each unit sharded alone, the rest as the root."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from fullshard.comm import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupTransport,
    ReduceScatter,
)
from fullshard.comm.spi import require
from fullshard.insight import statistics
from fullshard.optim import clip_grad_norm_
from fullshard.policies import CPUOffloadPolicy, DepthPrefetch, MixedPrecisionPolicy, NoPrefetch
from fullshard.preflight import recompute_units
from fullshard.samehost import same_host_transport
from fullshard.sharding import FSDPModule, fully_shard
from fullshard_bench.contestants.fsdp_options import fsdp_options
from fullshard_bench.contestants.training import (
    Stopwatch,
    Trainee,
    empty_model,
    make_optimizer,
    materialise,
)
from fullshard_bench.errors import BenchError, told_of
from fullshard_bench.launching.arena import Arena
from fullshard_bench.loading import load_object
from fullshard_bench.models.workload import Workload
from fullshard_bench.settings import Settings

__all__ = ["build_fullshard", "check_fullshard"]


def check_fullshard(settings: Settings) -> None:
    """Raise before any rank starts what `build_fullshard` cannot do.

    Raises:
        BenchError: `comm` makes no all-gather and no reduce-scatter.
    """
    if settings.comm:
        _make_comm(settings.comm)


def build_fullshard(workload: Workload, settings: Settings, arena: Arena, **more: Any) -> Trainee:
    """`fullshard.sharding.fully_shard` on every unit, then on the model.

    `more` arguments of `fully_shard` go before those that the settings stand for.
    """
    model = empty_model(workload, arena.device, settings.seed)
    units = list(workload.units(model))
    if settings.checkpointing:
        recompute_units(units)
    options = {**_options(settings, arena), **more}
    watch = Stopwatch()
    with watch.running():
        for unit in units:
            fully_shard(unit, mesh=arena.mesh, **options)
        fully_shard(model, mesh=arena.mesh, **options)
        if workload.on_meta:
            home = torch.device("cpu") if settings.offload else arena.device
            model.to_empty(device=home)
    assert isinstance(model, FSDPModule)
    if settings.transport != "default" and not arena.silent:
        _use_transport(settings.transport, model, arena)
    if settings.comm:
        _plug_in(settings.comm, model)
    materialise(model, workload, settings, arena.device, real=not arena.silent)
    counted = statistics(model)
    owned = list(model.parameters())

    def clip() -> torch.Tensor:
        return clip_grad_norm_(owned, settings.clip)

    return Trainee(
        model=model,
        workload=workload,
        optimizer=make_optimizer(owned),
        clip=clip if settings.clip else None,
        groups=len(counted.groups),
        padding_percent=100 * counted.total.padding_bytes / counted.total.gathered_bytes,
        construction_s=watch.seconds,
    )


def _options(settings: Settings, arena: Arena) -> dict[str, Any]:
    options = fsdp_options(settings, arena.device, MixedPrecisionPolicy, CPUOffloadPolicy)
    if settings.prefetch == 0:
        options["prefetch_policy"] = NoPrefetch()
    elif settings.prefetch > 0:
        depth = settings.prefetch
        options["prefetch_policy"] = DepthPrefetch(forward=depth, backward=depth)
    return options


def _use_transport(name: str, model: FSDPModule, arena: Arena) -> None:
    """Has every group's bytes moved by one transport."""
    shards = arena.mesh.get_group(arena.mesh.ndim - 1)
    transport = ProcessGroupTransport() if name == "process-group" else same_host_transport(shards)
    for module in _sharded_modules(model):
        module.set_custom_all_gather(DefaultAllGather(transport=transport))
        module.set_custom_reduce_scatter(DefaultReduceScatter(transport=transport))


def _sharded_modules(model: FSDPModule) -> list[FSDPModule]:
    assert isinstance(model, torch.nn.Module)
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _plug_in(text: str, model: FSDPModule) -> None:
    """Hand one object of the user's class to every group: as all-gather, reduce-scatter or both.

    The policy of its `__call__`: a reduce-scatter takes `op`.
    """
    comm = _make_comm(text)
    reduces = _reduces(comm)
    for module in _sharded_modules(model):
        if reduces:
            module.set_custom_reduce_scatter(comm)
        else:
            module.set_custom_all_gather(comm)


def _make_comm(text: str) -> Any:
    """Return an object of the user's class.

    Raises:
        BenchError: it cannot be made without arguments, or has not the methods.
    """
    made = load_object(text, "--comm")
    try:
        comm = made()
    except Exception as error:
        raise BenchError(
            f"--comm {text}: {told_of(error)}; pass a class that takes no arguments"
        ) from error
    try:
        require(ReduceScatter if _reduces(comm) else AllGather, comm)
    except TypeError as error:
        raise BenchError(f"--comm {text}: {error}") from error
    return comm


def _reduces(comm: object) -> bool:
    return callable(comm) and "op" in inspect.signature(comm).parameters
