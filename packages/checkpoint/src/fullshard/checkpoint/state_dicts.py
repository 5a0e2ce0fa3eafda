"""Between an optimizer's own state dict and one by names that any sharding of the model can load.

Owns the order of naming, checking, agreeing, gathering or cutting, and keying, for both directions.
What does not fit is known to all ranks before the first tensor travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import agree
from fullshard.checkpoint.boxes import box_of
from fullshard.checkpoint.names import ParamNames
from fullshard.checkpoint.options import OptimStateKind, OptimStateOptions
from fullshard.checkpoint.parts import (
    as_cut,
    as_parts,
    copied,
    cut_alike,
    map_state,
    unwrapped,
    whole,
)
from fullshard.checkpoint.transfer import Sender, first_rank, gathered, without_parts
from fullshard.sharding import map_tensors
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.optim.rules import STEP_NUMBERS

__all__ = ["loadable_state", "saved_state"]


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
    agree(params if full else {}, parts, error)
    first = first_rank(params, group) if options.rank0_only else None

    def given(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor) and full:
            found = gathered(tensor, first)
            return tensor if found is None else found.cpu() if options.offload_to_cpu else found
        is_local = isinstance(tensor, DTensor) and options.kind is OptimStateKind.LOCAL
        part = local_shard(tensor) if is_local else tensor
        return copied(part, to_cpu=options.offload_to_cpu)

    # in the order of the model on every rank
    given_out = {name: map_tensors(given, parts[name]) for name in params if name in parts}
    if first is not None and dist.is_initialized() and dist.get_rank() != first:
        return {}
    own = {key: value for key, value in named["state"].items() if key not in params}
    return {**named, "state": {**given_out, **own}}


@torch.no_grad()
def loadable_state(
    names: ParamNames,
    state_dict: Mapping[str, Any] | None,
    own: Mapping[str, Any] | None = None,
    *,
    together: bool = False,
    sender: Sender | None = None,
) -> dict[str, Any]:
    """Returns ``state_dict`` as the optimizer loads it.

    Args:
        names: those of the model and its optimizer.
        state_dict: with names or ids for keys.
        own: what the optimizer calls its parameters, if not by ids.
        together: all ranks call, and parts may travel.
        sender: who alone has the state dict; None: every rank.
    """
    params = names.params
    named: dict[str, Any] = {"state": {}}
    outline: dict[str, Any] = {}
    error: Exception | None = None
    try:
        keys = names.keys(own)
        if sender is None or sender.mine:
            named = names.by_name(state_dict or {})
            names.by_key(named, keys)
            outline = named if sender is None else without_parts(named, params)
    except Exception as caught:
        error = caught
    if sender is None:
        agree(params if together else {}, named["state"], error)
    else:
        sender.agree(error)
        named = sender.scatter(named, outline, params)
    state = {
        name: map_state(partial(_part_of, name, param), named["state"].pop(name))
        for name, param in params.items()  # in the order of the model on every rank
        if name in named["state"]
    }
    return names.by_key({**named, "state": {**state, **named["state"]}}, keys)


def _part_of(name: str, param: torch.Tensor, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of what this rank keeps of ``tensor``, under ``key`` in a state of ``param``.

    A whole tensor of the parameter's shape is cut as the parameter; a part, whether it says so or
    has the shape of the shard, becomes a ``DTensor``; anything else stays what it is. What is cut
    otherwise is brought together by a collective. Steps change the copy only, so that a state dict
    can be loaded again.
    """
    tensor = unwrapped(tensor, param)
    if isinstance(tensor, DTensor):
        of_its_own = isinstance(param, DTensor) and tensor.shape != param.shape
        if of_its_own or cut_alike(tensor, param):
            return tensor.detach().clone()
        tensor = whole(tensor)
    tensor = tensor.detach()
    if not isinstance(param, DTensor) or (tensor.ndim == 0 and key in STEP_NUMBERS):
        return tensor.clone()
    shard = local_shard(param)
    try:
        part = box_of(param).of(tensor) if tensor.shape == param.shape else tensor
    except Exception as error:
        error.add_note(f"while cutting {key} of {name}, a {type(tensor).__name__}")
        raise
    if part.shape != shard.shape:
        return tensor.clone()
    return as_cut(param, part.to(shard.device).clone(memory_format=torch.contiguous_format))
