"""Contestants for slow links: `--impl fullshard_bench.slow_links:bf16`, and so on.

Owns fullshard's `WirePolicy` with and without gathers ahead, hosts that talk once (of a run with
`--ranks-per-host`), and torch's own in bf16: what it has to send half. Their settings are the
settings of the run, except for the choices in their names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from fullshard.policies import DepthPrefetch
from fullshard.sharding import FSDPModule, ShardingPlacements
from fullshard.wire import ErrorFeedback, Quantised, WirePolicy
from fullshard_bench.contestants.rival import build_torch
from fullshard_bench.contestants.sharded import build_fullshard
from fullshard_bench.contestants.training import Trainee
from fullshard_bench.launching.arena import Arena
from fullshard_bench.models.workload import Workload
from fullshard_bench.settings import Settings

__all__ = [
    "ahead",
    "bf16",
    "bf16_ahead",
    "e4m3",
    "hosts",
    "hosts_ahead",
    "hosts_bf16",
    "hosts_bf16_ahead",
    "inside",
    "int8",
    "int8_ahead",
    "int8_feedback",
    "torch_bf16",
]

_BF16 = WirePolicy(gathers=torch.bfloat16, reductions=torch.bfloat16)
_INT8 = WirePolicy(
    gathers=Quantised(torch.int8), reductions=torch.bfloat16, exact=("*norm*", "*.bias")
)
_E4M3 = replace(_INT8, gathers=Quantised(torch.float8_e4m3fn))


def ahead(workload: Workload, settings: Settings, arena: Arena, **options: Any) -> Trainee:
    """fullshard, with one unit gathered ahead in forward, too; the last stays for backward."""
    policy = DepthPrefetch(forward=1)
    trainee = build_fullshard(workload, settings, arena, prefetch_policy=policy, **options)
    last = workload.units(trainee.model)[-1]
    assert isinstance(last, FSDPModule)
    last.set_reshard_after_forward(False)
    return trainee


def bf16(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with parameters and gradients in bf16 on the wire."""
    return _narrowed(build_fullshard(workload, settings, arena, wire_policy=_BF16))


def bf16_ahead(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The contestant ``bf16``, gathered as by ``ahead``."""
    return _narrowed(ahead(workload, settings, arena, wire_policy=_BF16))


def int8(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with matrices in blocks of int8 and gradients in bf16 on the wire."""
    return _narrowed(build_fullshard(workload, settings, arena, wire_policy=_INT8))


def int8_ahead(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The contestant ``int8``, gathered as by ``ahead``."""
    return _narrowed(ahead(workload, settings, arena, wire_policy=_INT8))


def e4m3(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with matrices in blocks of e4m3 and gradients in bf16 on the wire."""
    return _narrowed(build_fullshard(workload, settings, arena, wire_policy=_E4M3))


def int8_feedback(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with matrices and their gradients in int8, and error feedback."""
    return _narrowed(build_fullshard(workload, settings, arena, wire_policy=_with_feedback()))


def _with_feedback() -> WirePolicy:
    """Return a policy for one model, since its residuals belong to the model."""
    return replace(_INT8, reductions=Quantised(torch.int8, feedback=ErrorFeedback()))


def hosts(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with hosts that talk once."""
    return build_fullshard(workload, settings, arena, wire_policy=_by_hosts(settings, arena))


def hosts_ahead(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The contestant ``hosts``, gathered as by ``ahead``."""
    return ahead(workload, settings, arena, wire_policy=_by_hosts(settings, arena))


def hosts_bf16(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with hosts that talk once, in bf16: gradients are exact inside a host."""
    policy = _by_hosts(settings, arena, _BF16)
    return _narrowed(build_fullshard(workload, settings, arena, wire_policy=policy))


def hosts_bf16_ahead(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The contestant ``hosts_bf16``, gathered as by ``ahead``."""
    return _narrowed(
        ahead(workload, settings, arena, wire_policy=_by_hosts(settings, arena, _BF16))
    )


def inside(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with parameters sharded inside a host, and optimizer state over all hosts."""
    ranks, per_host = arena.mesh.size(), settings.ranks_per_host
    shape = (ranks // per_host, per_host)
    mesh = init_device_mesh(arena.mesh.device_type, shape, mesh_dim_names=("outer", "inner"))
    placements = ShardingPlacements(compute="inner", gradients="inner")
    return build_fullshard(workload, settings, replace(arena, mesh=mesh), placements=placements)


def _by_hosts(settings: Settings, arena: Arena, policy: WirePolicy | None = None) -> WirePolicy:
    """Return the policy with hosts that talk once; unchanged where nothing is moved."""
    policy = WirePolicy() if policy is None else policy
    return policy if arena.silent else replace(policy, hosts=settings.ranks_per_host)


def _narrowed(trainee: Trainee) -> Trainee:
    """Return the trainee, marked for the tolerance of bf16, since it sends fewer bytes."""
    trainee.rounds_to = "bfloat16"
    return trainee


def torch_bf16(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """Torch's own `fully_shard` with `param_dtype` and `reduce_dtype` of bf16."""
    in_bf16 = replace(settings, dtype="bfloat16", reduce_dtype="bfloat16")
    return _narrowed(build_torch(workload, in_bf16, arena))
