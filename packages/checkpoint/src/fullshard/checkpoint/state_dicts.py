"""Between an optimizer's own state dict and one by names that any sharding of the model can load.

Owns the order of both directions: name, check, agree, move one tensor after the other, key. All
ranks know of missing or mismatched entries before the first tensor travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import parts
from fullshard.checkpoint.agreement import agree, reporting_errors
from fullshard.checkpoint.names import ParamNames, StateDict
from fullshard.checkpoint.options import OptimStateKind, OptimStateOptions
from fullshard.checkpoint.parts import Place, map_state
from fullshard.checkpoint.transfer import first_rank, gathered, require_plain, scattered, sender_of
from fullshard.sharding import map_tensors
from fullshard.sharding.spi import local_shard

__all__ = ["loadable_state", "saved_state"]


@torch.no_grad()
def saved_state(
    names: ParamNames,
    state_dict: Mapping[str, Any] | None,
    options: OptimStateOptions,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Return ``state_dict``, or the optimizer's own, by names and as ``options`` say.

    Args:
        names: those of the model and its optimizer.
        state_dict: the state dict to translate; None: the optimizer's own.
        options: what stands for parts, where, and on which ranks.
        group: the ranks of the model; None: those of its meshes.
    """
    compared = names.params if options.kind is OptimStateKind.FULL else {}
    state: StateDict = {}
    with reporting_errors(partial(agree, compared, state)):
        _ = names.groups  # lets the optimizer go of replaced parameters
        assert names.optim is not None, "saving takes an optimizer"
        named = names.by_name(names.optim.state_dict() if state_dict is None else state_dict)
        state.update(map_state(parts.as_part, names.params, named["state"]))
    first = first_rank(names.params, group) if options.rank0_only else None
    given = map_state(partial(_given, options, first), names.params, state)
    if first is not None and dist.is_initialized() and dist.get_rank() != first:
        return {}
    # a learning rate may be a tensor, which schedulers change in place
    rest = {key: value for key, value in named.items() if key != "state"}
    return {**map_tensors(_copied, rest), "state": given}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _given(
    options: OptimStateOptions, first: int | None, at: Place, tensor: torch.Tensor
) -> torch.Tensor:
    """Return what stands for ``tensor`` in a state dict; rank ``first`` alone gets whole ones."""
    if isinstance(tensor, DTensor) and at.param is not None:
        if options.kind is OptimStateKind.FULL:
            whole = gathered(tensor, first)
            return tensor if whole is None else whole.cpu() if options.offload_to_cpu else whole
        if options.kind is OptimStateKind.LOCAL:
            tensor = local_shard(tensor)
    device = "cpu" if options.offload_to_cpu else tensor.device
    return tensor.detach().to(device, copy=True)  # which steps do not change


@torch.no_grad()
def loadable_state(
    names: ParamNames,
    state_dict: Mapping[str, Any] | None,
    options: OptimStateOptions,
    group: dist.ProcessGroup | None = None,
    own: Mapping[str, Any] | None = None,
) -> StateDict:
    """Return ``state_dict`` as the optimizer loads it.

    Args:
        names: those of the model and its optimizer.
        state_dict: with names or ids for keys; with ``rank0_only``, read on the first rank only.
        options: in what form it came. Of shards, all ranks call together.
        group: the ranks of the model; None: those of its mesh, if it has one axis, or all ranks.
        own: the optimizer's own state dict, whose keys are used; None: ids.
    """
    sender = sender_of(names.params, group) if options.rank0_only else None
    compared = names.params if options.kind is OptimStateKind.SHARDED else {}
    state: StateDict = {}
    with reporting_errors(partial(agree, compared, state) if sender is None else sender.agree):
        mine = sender is None or sender.mine
        named = names.by_name(state_dict or {}) if mine else {"state": {}}
        names.by_key(named, own)  # raises what does not fit
        prepare = parts.unwrapped if sender is None else require_plain
        state.update(map_state(prepare, names.params, named["state"]))
    named["state"] = state
    if sender is not None:
        return names.by_key(scattered(sender, names.params, named), own)
    return names.by_key({**named, "state": map_state(parts.loadable, names.params, state)}, own)
