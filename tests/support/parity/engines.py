"""The two engines that parity tests run side by side: ours, and torch's own as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh

from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.parity.models import Case, build
from support.ranks import cpu_mesh


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One implementation of ``fully_shard``.

    Attributes:
        fully_shard: the function.
        mixed: its mixed precision policy.
    """

    fully_shard: Callable[..., Any]
    mixed: Callable[..., Any]


OURS = Engine(fully_shard=fully_shard, mixed=MixedPrecisionPolicy)
TORCH = Engine(fully_shard=torch_fsdp.fully_shard, mixed=torch_fsdp.MixedPrecisionPolicy)


def shard(
    case: Case,
    engine: Engine = OURS,
    *,
    dtype: torch.dtype | None = torch.float32,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> nn.Module:
    """The model of ``case``, sharded unit by unit and then as a whole, with the same options."""
    model = build(case, dtype)
    options["mesh"] = mesh = cpu_mesh() if mesh is None else mesh
    if engine == TORCH:  # ranks get a copy
        model.to(mesh.device_type)  # torch's own moves no parameters to the asynchronous device
    for unit in case.units_of(model):
        engine.fully_shard(unit, **options)
    engine.fully_shard(model, **options)
    return model


def tell(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> None:
    """Calls a method of a sharded module; an unsharded model needs no telling."""
    found = getattr(model, method, None)
    if found is not None:
        found(*args, **kwargs)
