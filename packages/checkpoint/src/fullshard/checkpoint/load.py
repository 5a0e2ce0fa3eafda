"""Loading an optimizer's state: each rank's part of what every rank, or the first alone, has.

Owns the order of naming, checking, cutting and keying. What does not fit is said before anything is
cut or sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fullshard.checkpoint.agreement import agree
from fullshard.checkpoint.keys import ParamNames, by_key, by_name
from fullshard.checkpoint.leaves import part_of
from fullshard.checkpoint.scatter import scatter_state
from fullshard.checkpoint.sharded_tensors import unwrapped
from fullshard.checkpoint.source import (
    OptimSource,
    keys_of,
    params_of,
    sender_of,
    with_state,
)
from fullshard.sharding.base.tensors import map_tensors

__all__ = ["loadable_state", "scattered_state"]

_StateDict = dict[str, Any]


@torch.no_grad()
def loadable_state(
    source: OptimSource,
    state_dict: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    *,
    together: bool = False,
) -> _StateDict:
    """Returns ``state_dict`` as the optimizer loads it.

    Args:
        source: the model and its optimizer.
        state_dict: with names or ids for keys.
        own: what the optimizer calls its parameters, if not by ids.
        together: all ranks call, and parts may travel.
    """
    names = ParamNames(source.model)
    params = params_of(names)
    named: _StateDict = {"state": {}}
    error: Exception | None = None
    try:
        layout = source.layout(names)
        named = by_name(state_dict, names, layout)
        keys = keys_of(layout, own)
        _require_known(named, params, keys)
        by_key(named, layout, keys)
    except Exception as caught:
        error = caught
    if together:
        parts = {n: v for n, v in named["state"].items() if n in params}
        agree(params, parts, error)
        named["state"].update(parts)
    elif error is not None:
        raise error
    return by_key(_cut(named, params), layout, keys)


@torch.no_grad()
def scattered_state(
    source: OptimSource, state_dict: Mapping[str, Any] | None, own: Mapping[str, Any] | None
) -> _StateDict:
    """Returns this rank's part of the first rank's ``state_dict``; arguments as above."""
    names = ParamNames(source.model)
    params = params_of(names)
    sender = sender_of(params, source.group)
    layout = source.layout(names)
    keys = keys_of(layout, own)
    named: _StateDict | None = None
    error: Exception | None = None
    if sender is None or sender.mine:
        try:
            named = by_name(state_dict or {}, names, layout)
            _require_known(named, params, keys)
            by_key(named, layout, keys)
        except Exception as caught:
            error = caught
    if sender is None:
        if error is not None:
            raise error
        assert named is not None, "there is a state dict or an error"
    else:
        named = scatter_state(named, error, params, sender)
    return by_key(_cut(named, params), layout, keys)


def _cut(named: _StateDict, params: dict[str, torch.Tensor]) -> _StateDict:
    """Returns ``named`` with this rank's parts, in the order of the model on every rank."""
    state = {}
    for name, param in params.items():
        if name not in named["state"]:
            continue
        value = named["state"][name]
        items = value.items() if isinstance(value, dict) else [("", value)]
        cut = {
            key: map_tensors(lambda t: part_of(param, str(key), unwrapped(t, param)), item)  # noqa: B023  # called at once
            for key, item in items
        }
        state[name] = cut if isinstance(value, dict) else cut[""]
    return with_state(named, state, params)


def _require_known(
    named: Mapping[str, Any], params: Mapping[str, torch.Tensor], keys: Mapping[str, Any]
) -> None:
    """Returns if every parameter with state is the optimizer's.

    Raises:
        ValueError: if not, naming the first.
    """
    for name in named["state"]:
        if name in params and name not in keys:
            raise ValueError(
                f"the state dict has state for {name}, which the optimizer lacks; load it into an "
                "optimizer over the same parameters"
            )
