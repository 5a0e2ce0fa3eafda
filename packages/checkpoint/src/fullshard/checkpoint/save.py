"""Saving an optimizer's state: whole, in shards, or this rank's parts.

Owns the order of naming, agreeing and gathering. Errors of any rank are known to all before the
first tensor travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import agree
from fullshard.checkpoint.gather import Receiver, gather_parts
from fullshard.checkpoint.keys import ParamNames, by_name
from fullshard.checkpoint.leaves import as_parts, leaves_of
from fullshard.checkpoint.options import OptimStateKind, OptimStateOptions
from fullshard.checkpoint.source import OptimSource, first_rank, params_of, with_state
from fullshard.sharding.base.compat import local_shard, make_dtensor, spec_of
from fullshard.sharding.base.tensors import map_tensors

__all__ = ["saved_state"]

_StateDict = dict[str, Any]


@torch.no_grad()
def saved_state(
    source: OptimSource, state_dict: Mapping[str, Any] | None, options: OptimStateOptions
) -> _StateDict:
    """Returns ``state_dict``, or the optimizer's own, by names and as ``options`` say."""
    names = ParamNames(source.model)
    params = params_of(names)
    named: _StateDict = {"state": {}}
    state: _StateDict = {}
    error: Exception | None = None
    try:
        layout = source.layout(names)
        assert source.optim is not None, "saving takes an optimizer"
        found = source.optim.state_dict() if state_dict is None else state_dict
        named = by_name(found, names, layout)
        state = {
            name: as_parts(param, named["state"][name])
            for name, param in params.items()
            if name in named["state"]
        }
    except Exception as caught:
        error = caught
    if options.kind is OptimStateKind.FULL:
        agree(params, state, error)
        first = first_rank(params, source.group) if options.rank0_only else None
        return _whole(named, state, params, Receiver(first=first, to_cpu=options.offload_to_cpu))
    if error is not None:
        raise error
    part = _sharded if options.kind is OptimStateKind.SHARDED else _local
    return with_state(named, {n: map_tensors(part(options), v) for n, v in state.items()}, params)


def _whole(
    named: _StateDict, state: _StateDict, params: dict[str, torch.Tensor], receiver: Receiver
) -> _StateDict:
    """Returns ``named`` with whole tensors; an empty dict where this rank is not to have them."""
    order = [name for name in params if name in state]  # the same on all ranks
    parts = {
        id(leaf): leaf
        for name in order
        for _, leaf in leaves_of(state[name])
        if isinstance(leaf, DTensor)
    }
    whole = dict(zip(parts, gather_parts(list(parts.values()), receiver), strict=True))
    if not receiver.mine:
        return {}

    def found(tensor: torch.Tensor) -> torch.Tensor:
        full = whole.get(id(tensor))
        return receiver.copy(tensor) if full is None else full

    return with_state(named, {name: map_tensors(found, state[name]) for name in order}, params)


def _sharded(options: OptimStateOptions) -> Callable[[torch.Tensor], torch.Tensor]:
    copy = _copy(options)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return make_dtensor(copy(local_shard(tensor)), spec_of(tensor))
        return copy(tensor)

    return part


def _local(options: OptimStateOptions) -> Callable[[torch.Tensor], torch.Tensor]:
    copy = _copy(options)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return copy(local_shard(tensor) if isinstance(tensor, DTensor) else tensor)

    return part


def _copy(options: OptimStateOptions) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what copies a tensor to where it was asked for: a step does not change the copy."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu" if options.offload_to_cpu else tensor.device, copy=True)

    return copy
