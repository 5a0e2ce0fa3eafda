"""Loading an optimizer's state: each rank's part of what every rank, or the first alone, has.

Owns the order of naming, checking, cutting and keying. What does not fit is said before anything is
cut or sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from fullshard.checkpoint.agreement import agree
from fullshard.checkpoint.names import ParamNames
from fullshard.checkpoint.parts import as_cut, map_state, whole
from fullshard.checkpoint.sharded_tensors import unwrapped
from fullshard.checkpoint.transfer import Sender, without_parts
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.optim.rules import STEP_NUMBERS
from fullshard.sharding.params.owner import owner_of

__all__ = ["loadable_state"]


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
    named: dict[str, Any] = {"state": {}}
    sent: list[torch.Tensor] = []
    error: Exception | None = None
    try:
        keys = names.keys(own)
        if sender is None or sender.mine:
            named = names.by_name(state_dict or {})
            names.by_key(named, keys)
            if sender is not None:
                named["state"] = without_parts(named["state"], names.params, sent)
    except Exception as caught:
        error = caught
    if sender is not None:
        named = sender.scatter(named, sent, names.params, error)
    elif together:
        agree(names.params, named["state"], error)
    elif error is not None:
        raise error
    state = {
        name: map_state(partial(_part_of, param), named["state"].pop(name))
        for name, param in names.params.items()  # in the order of the model on every rank
        if name in named["state"]
    }
    return names.by_key({**named, "state": {**state, **named["state"]}}, keys)


def _part_of(param: torch.Tensor, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of what this rank keeps of ``tensor``, under ``key`` in a state of ``param``.

    A whole tensor of the parameter's shape is cut as the parameter; a part, whether it says so or
    has the shape of the shard, becomes a ``DTensor``; anything else stays what it is. What is cut
    otherwise is brought together by a collective. Steps change the copy only, so that a state dict
    can be loaded again.
    """
    tensor = unwrapped(tensor, param)
    if isinstance(tensor, DTensor):
        if isinstance(param, DTensor):
            same = (tensor.placements, tensor.device_mesh) == (param.placements, param.device_mesh)
            if same or tensor.shape != param.shape:
                return tensor.detach().clone()
        tensor = whole(tensor)
    if not isinstance(param, DTensor) or (tensor.ndim == 0 and key in STEP_NUMBERS):
        return tensor.detach().clone()
    shard = local_shard(param)
    if tensor.shape == param.shape:
        return as_cut(param, _cut(param, tensor.detach()).to(shard.device))
    if tensor.ndim > 0 and tensor.shape == shard.shape:
        return as_cut(param, tensor.detach().to(shard.device, copy=True))
    return tensor.detach().clone()


def _cut(param: DTensor, full: torch.Tensor) -> torch.Tensor:
    """Returns a copy of this rank's part of ``full``; nothing is sent."""
    owner = owner_of(param)
    if owner is not None:
        return owner.param.shard_of(full)
    mesh = param.device_mesh
    there = full.to(mesh.device_type)
    return local_shard(distribute_tensor(there, mesh, param.placements, src_data_rank=None)).clone()
