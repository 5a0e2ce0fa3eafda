"""Contestants for slow links: `--impl fullshard_bench.slow_links:bf16`, and so on.

Owns fullshard's `WirePolicy` with and without gathers ahead, hosts that talk once (of a run with
`--ranks-per-host`), and torch's own in bf16: what it has to send half. Their settings are the
settings of the run, except for the choices in their names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fullshard.policies import DepthPrefetch
from fullshard.sharding import FSDPModule
from fullshard.wire import Quantised, WirePolicy
from fullshard_bench.arena import Arena
from fullshard_bench.rival import build_torch
from fullshard_bench.settings import Settings
from fullshard_bench.sharded import build_fullshard
from fullshard_bench.training import Trainee
from fullshard_bench.workload import Workload

__all__ = [
    "ahead",
    "bf16",
    "bf16_ahead",
    "hosts",
    "hosts_ahead",
    "hosts_bf16",
    "hosts_bf16_ahead",
    "int8",
    "int8_ahead",
    "torch_bf16",
]

_BF16 = WirePolicy(gathers=torch.bfloat16, reductions=torch.bfloat16)
_INT8 = WirePolicy(
    gathers=Quantised(torch.int8), reductions=torch.bfloat16, exact=("*norm*", "*.bias")
)


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
    """The same, gathered as by ``ahead``."""
    return _narrowed(ahead(workload, settings, arena, wire_policy=_BF16))


def int8(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with matrices in blocks of int8 and gradients in bf16 on the wire."""
    return _narrowed(build_fullshard(workload, settings, arena, wire_policy=_INT8))


def int8_ahead(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The same, gathered as by ``ahead``."""
    return _narrowed(ahead(workload, settings, arena, wire_policy=_INT8))


def hosts(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with hosts that talk once."""
    return build_fullshard(workload, settings, arena, wire_policy=_by_hosts(settings, arena))


def hosts_ahead(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The same, gathered as by ``ahead``."""
    return ahead(workload, settings, arena, wire_policy=_by_hosts(settings, arena))


def hosts_bf16(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """fullshard, with hosts that talk once, in bf16: gradients are exact inside a host."""
    policy = _by_hosts(settings, arena, _BF16)
    return _narrowed(build_fullshard(workload, settings, arena, wire_policy=policy))


def hosts_bf16_ahead(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The same, gathered as by ``ahead``."""
    return _narrowed(
        ahead(workload, settings, arena, wire_policy=_by_hosts(settings, arena, _BF16))
    )


def _by_hosts(settings: Settings, arena: Arena, policy: WirePolicy | None = None) -> WirePolicy:
    """The same policy by hosts; where nothing is moved there are none to agree with."""
    policy = WirePolicy() if policy is None else policy
    return policy if arena.silent else replace(policy, hosts=settings.ranks_per_host)


def _narrowed(trainee: Trainee) -> Trainee:
    """A wire policy that sends fewer bytes: it is compared with what computes in bf16."""
    trainee.rounds_to = "bfloat16"
    return trainee


def torch_bf16(workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """Torch's own `fully_shard` with `param_dtype` and `reduce_dtype` of bf16."""
    in_bf16 = replace(settings, dtype="bfloat16", reduce_dtype="bfloat16")
    return _narrowed(build_torch(workload, in_bf16, arena))
