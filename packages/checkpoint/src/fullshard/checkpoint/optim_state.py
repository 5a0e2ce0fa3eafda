"""An optimizer's state that travels: saved from one sharding, loaded into any other, or into none.

Owns the public functions, under the names that FSDP1's static methods have; they take any model
that ``fully_shard`` shards, a part of it, or an unsharded model. State goes by the clean names of
parameters, so it fits a model that is wrapped otherwise, unwrapped, or on more or fewer ranks.
Other files name, gather, cut and scatter the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer

from fullshard.checkpoint.names import OptimInput, ParamNames, StateDict
from fullshard.checkpoint.options import (
    OptimStateKeyType,
    OptimStateKind,
    OptimStateOptions,
    optim_state_options,
)
from fullshard.checkpoint.state_dicts import loadable_state, saved_state
from fullshard.sharding import converted

__all__ = [
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]

_FULL = OptimStateOptions()
_FROM_FIRST = OptimStateOptions(rank0_only=True)
_SHARDS = OptimStateOptions(kind=OptimStateKind.SHARDED, offload_to_cpu=False)


# -- saving ---------------------------------------------------------------------------------------


def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Return the whole state of ``optim``, on the CPU, by names; call it on every rank.

    The result equals the state of the unsharded model's optimizer, with names in place of ids.

    Args:
        model: the model whose parameters ``optim`` steps, sharded or not, or a part of it.
        optim: its optimizer.
        optim_input: what the optimizer was built with, if not its groups.
        rank0_only: give it to rank 0 of ``group`` only; other ranks get an empty dict. Other ranks
            hold their own parts only. Exceptions are partial sums and tensors of a user's subclass:
            each is whole on every rank, one at a time.
        group: the ranks of the model; None: those of its meshes.

    Raises:
        RankMismatchError: on every rank, if they have other kinds of state.
        ValueError: if the optimizer has a parameter that the model does not have.
    """
    names = ParamNames(model, optim, optim_input)
    return saved_state(names, None, OptimStateOptions(rank0_only=rank0_only), group)


def sharded_optim_state_dict(
    model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
) -> StateDict:
    """Return the state of ``optim`` by names, in which every part is a ``DTensor``.

    Nothing is sent. The result is what ``torch.distributed.checkpoint`` saves and loads.

    Args:
        model: the model whose parameters ``optim`` steps.
        optim: its optimizer.
        group: the ranks of the model; they are not asked.

    Raises:
        ValueError: if the optimizer has a parameter that the model does not have.
    """
    return saved_state(ParamNames(model, optim), None, _SHARDS)


def optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Return the state of ``optim`` by names, as the model's ``OptimStateOptions`` say.

    Args:
        model: the model whose parameters ``optim`` steps; see ``set_optim_state_options``.
        optim: its optimizer.
        optim_state_dict: the state dict to translate; None: ``optim.state_dict()``.
        group: the ranks of the model; None: those of its meshes.

    Raises:
        RankMismatchError: on every rank, if they have other kinds of state.
        ValueError: if the optimizer has a parameter that the model does not have.
    """
    names = ParamNames(model, optim)
    return saved_state(names, optim_state_dict, optim_state_options(model), group)


# -- loading --------------------------------------------------------------------------------------


def shard_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any],
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Return this rank's part of a full state dict, for ``optim.load_state_dict``.

    Nothing is sent: every rank has all of it and cuts out its part.

    Args:
        full_optim_state_dict: whole tensors, with names or ids for keys.
        model: the model whose parameters the optimizer steps, sharded or not.
        optim_input: what the optimizer was built with; None: ``optim``'s own groups.
        optim: the optimizer; with neither, ids are positions in ``model.parameters()``.

    Raises:
        ValueError: if model, optimizer and state dict do not have the same parameters.
    """
    return loadable_state(ParamNames(model, optim, optim_input), full_optim_state_dict, _FULL)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: Optimizer
) -> StateDict:
    """Return a sharded state dict for ``optim.load_state_dict``; call it on every rank.

    A part that is cut like the parameter of ``model`` is used unchanged. A part on another mesh is
    gathered and cut again, one after the other.

    Args:
        sharded_optim_state_dict: what ``sharded_optim_state_dict`` gave, or was read into.
        model: the model whose parameters ``optim`` steps, sharded or not.
        optim: its optimizer.

    Raises:
        RankMismatchError: on every rank, if they have other kinds of state.
        ValueError: if model, optimizer and state dict do not have the same parameters.
    """
    return loadable_state(ParamNames(model, optim), sharded_optim_state_dict, _SHARDS)


def scatter_full_optim_state_dict(
    full_optim_state_dict: Mapping[str, Any] | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Return this rank's part of rank 0's state dict, for ``optim.load_state_dict``.

    Call it on every rank. No other rank ever holds more than its parts.

    Args:
        full_optim_state_dict: whole tensors, with names or ids for keys; read on rank 0 of
            ``group`` only.
        model: the model whose parameters the optimizer steps, sharded or not.
        optim_input: what the optimizer was built with; None: ``optim``'s own groups.
        optim: the optimizer; with neither, ids are positions in ``model.parameters()``.
        group: the ranks of the model; None: those of its mesh, if it has one axis, or all ranks.

    Raises:
        RankMismatchError: on all ranks but the first, if that one found an error.
        ValueError: if model, optimizer and state dict do not have the same parameters.
    """
    names = ParamNames(model, optim, optim_input)
    return loadable_state(names, full_optim_state_dict, _FROM_FIRST, group)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: Optimizer,
    optim_state_dict: Mapping[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> StateDict:
    """Return a state dict, in the form that the model's options say, for ``optim``.

    Args:
        model: the model whose parameters ``optim`` steps; see ``set_optim_state_options``.
        optim: its optimizer.
        optim_state_dict: what ``optim_state_dict`` gave; with ``rank0_only``, read on the first
            rank only.
        is_named_optimizer: use the keys of ``optim.state_dict()``, which may be names, not ids.
        load_directly: also load the result.
        group: the ranks of the model; None: those of its meshes.

    Raises:
        RankMismatchError: if other ranks have other kinds of state, or the first found an error.
        ValueError: if model, optimizer and state dict do not have the same parameters.
    """
    names, options = ParamNames(model, optim), optim_state_options(model)
    own = optim.state_dict() if is_named_optimizer else None
    loadable = loadable_state(names, optim_state_dict, options, group, own)
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def rekey_optim_state_dict(
    optim_state_dict: Mapping[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: Optimizer | None = None,
) -> StateDict:
    """Return ``optim_state_dict`` with names for ids, or ids for names; tensors are the same.

    Between an ordinary checkpoint of the unsharded model and full state dicts.

    Args:
        optim_state_dict: whole tensors, with names or ids for keys.
        optim_state_key_type: what keys are to be.
        model: the model whose parameters the optimizer steps.
        optim_input: what the optimizer was built with; None: ``optim``'s own groups.
        optim: the optimizer; with neither, ids are positions in ``model.parameters()``.

    Raises:
        TypeError: if ``optim_state_key_type`` is none.
        ValueError: if model, optimizer and state dict do not have the same parameters.
    """
    optim_state_key_type = converted(optim_state_key_type, {"OptimStateKeyType": OptimStateKeyType})
    if not isinstance(optim_state_key_type, OptimStateKeyType):
        raise TypeError(
            f"optim_state_key_type is {optim_state_key_type!r}; pass a "
            "fullshard.checkpoint.OptimStateKeyType"
        )
    names = ParamNames(model, optim, optim_input)
    named = names.by_name(optim_state_dict)
    return named if optim_state_key_type is OptimStateKeyType.PARAM_NAME else names.by_key(named)
