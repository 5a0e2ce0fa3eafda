"""Loading an optimizer's state: each rank's part of what every rank, or the first alone, has.

Owns the order of naming, checking, cutting and keying. What does not fit is said before anything is
cut or sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import agree
from fullshard.checkpoint.boxes import box_of
from fullshard.checkpoint.names import ParamNames
from fullshard.checkpoint.parts import as_cut, map_state, whole
from fullshard.checkpoint.sharded_tensors import unwrapped
from fullshard.checkpoint.transfer import Sender, without_parts
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.optim.rules import STEP_NUMBERS

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
    outline: dict[str, Any] = {}
    error: Exception | None = None
    try:
        keys = names.keys(own)
        if sender is None or sender.mine:
            named = names.by_name(state_dict or {})
            names.by_key(named, keys)
            if sender is not None:
                outline = without_parts(named, names.params)
    except Exception as caught:
        error = caught
    if sender is not None:
        sender.agree(error)
        named = sender.scatter(named, outline, names.params)
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
    tensor = tensor.detach()
    if not isinstance(param, DTensor) or (tensor.ndim == 0 and key in STEP_NUMBERS):
        return tensor.clone()
    shard = local_shard(param)
    if tensor.shape == param.shape:
        tensor = box_of(param).of(tensor)
        assert tensor.shape == shard.shape, "it is cut as the parameter is"
    if tensor.shape != shard.shape:
        return tensor.clone()
    return as_cut(param, tensor.to(shard.device).clone(memory_format=torch.contiguous_format))
