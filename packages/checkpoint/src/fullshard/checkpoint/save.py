"""Saving an optimizer's state: whole, in shards, or this rank's parts.

Owns the order of naming, agreeing and gathering. Errors of any rank are known to all before the
first tensor travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import agree
from fullshard.checkpoint.names import ParamNames
from fullshard.checkpoint.options import OptimStateKind, OptimStateOptions
from fullshard.checkpoint.parts import as_parts, copied
from fullshard.checkpoint.transfer import first_rank, gathered
from fullshard.sharding import map_tensors
from fullshard.sharding.base.compat import local_shard

__all__ = ["saved_state"]


@torch.no_grad()
def saved_state(
    names: ParamNames,
    state_dict: Mapping[str, Any] | None,
    options: OptimStateOptions,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Returns ``state_dict``, or the optimizer's own, by names and as ``options`` say.

    Args:
        names: those of the model and its optimizer.
        state_dict: the state dict to translate; None: the optimizer's own.
        options: what stands for parts, where, and on which ranks.
        group: the ranks of the model; None: those of its meshes.
    """
    params, full = names.params, options.kind is OptimStateKind.FULL
    named: dict[str, Any] = {"state": {}}
    parts: dict[str, Any] = {}
    error: Exception | None = None
    try:
        _ = names.groups  # lets the optimizer go of replaced parameters
        assert names.optim is not None, "saving takes an optimizer"
        named = names.by_name(names.optim.state_dict() if state_dict is None else state_dict)
        state = named["state"]
        parts = {name: as_parts(params[name], state[name]) for name in params if name in state}
    except Exception as caught:
        error = caught
    if full:
        agree(params, parts, error)
    elif error is not None:
        raise error
    first = first_rank(params, group) if options.rank0_only else None

    def given(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) and full:
            whole = gathered(tensor, first)
            return tensor if whole is None else whole.cpu() if options.offload_to_cpu else whole
        is_local = isinstance(tensor, DTensor) and options.kind is OptimStateKind.LOCAL
        part = local_shard(tensor) if is_local else tensor
        return copied(part, to_cpu=options.offload_to_cpu)

    # in the order of the model on every rank
    given_out = {name: map_tensors(given, parts[name]) for name in params if name in parts}
    if first is not None and dist.is_initialized() and dist.get_rank() != first:
        return {}
    own = {key: value for key, value in named["state"].items() if key not in params}
    return {**named, "state": {**given_out, **own}}
