"""What ranks must agree on before the state of an optimizer travels.

Owns one comparison per process group over which a parameter is spread: every rank raises alike. And
a rank that has no part of a parameter, and so no state of it, is given what others say of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.compat import ShardedTensor
from fullshard.checkpoint.parts import PLAIN, as_cut, map_state
from fullshard.sharding import RankMismatchError, map_tensors
from fullshard.sharding.base.comparison import Comparison
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.mesh.mesh_info import device_of_mesh

__all__ = ["EXCHANGE", "agree", "agree_over", "said_of", "settle"]

_State = dict[str, Any]

EXCHANGE = Comparison(
    what="the agreement on an optimizer's state",
    error="the optimizer's state cannot be exchanged, as some ranks found an error; ",
    mismatch="ranks disagree on the optimizer's state: ",
    advice="Step the same optimizer on the same parameters on every rank",
)
"""What errors of ranks, and differences between them, are told with."""


def said_of(error: BaseException | None) -> str:
    """Returns an error as the other ranks are told; nothing if there is none."""
    return "" if error is None else f"{type(error).__name__}: {error}"


def agree(params: Mapping[str, torch.Tensor], state: _State, error: Exception | None) -> None:
    """Returns if all ranks have the same kinds of state for the same parameters.

    A rank whose part of a parameter is empty, and that has no state for it, is given some.

    Args:
        params: the optimizer's parameters by name; those that are ``DTensor`` are compared.
        state: per name the state, in which parts are ``DTensor``; may gain names.
        error: what this rank found wrong by itself.

    Raises:
        RankMismatchError: on every rank, naming the first parameter that differs and what each rank
            has, or repeating the errors of other ranks.
        Exception: ``error``.
    """
    spread: dict[dist.ProcessGroup, dict[str, DTensor]] = {}
    for name, param in params.items():
        if isinstance(param, DTensor):
            for process_group in param.device_mesh.get_all_groups():
                spread.setdefault(process_group, {})[name] = param
    verdict = said_of(error)
    for process_group, compared in spread.items():
        found = _verdict(process_group, compared, state, verdict)
        if found.startswith(EXCHANGE.mismatch):  # on all of its ranks: some may have no part
            _fill(process_group, compared, state)
            found = _verdict(process_group, compared, state, verdict)
        verdict = found or verdict
    settle(error, verdict)


def agree_over(
    comparison: Comparison,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    lines: Sequence[str],
    error: BaseException | None,
) -> None:
    """Returns if all ranks of a process group say the same, and none has an error.

    Args:
        comparison: in whose words it is told.
        process_group: the ranks; None: this one alone.
        device: on which a digest travels.
        lines: what must be equal.
        error: what this rank found.

    Raises:
        RankMismatchError: if ranks differ, or another one has an error.
        Exception: ``error``.
    """
    verdict = ""
    if process_group is not None:
        told = [(line, line) for line in lines]
        verdict = comparison.verdict(told, said_of(error), process_group, device)
    settle(error, verdict)


def settle(error: BaseException | None, verdict: str) -> None:
    """Raises ``error``, or else what ranks told each other."""
    if error is not None:
        raise error
    if verdict:
        raise RankMismatchError(verdict)


def _verdict(
    process_group: dist.ProcessGroup, params: Mapping[str, DTensor], state: _State, known: str
) -> str:
    """Returns what is wrong on any rank; nothing if nothing is, or the same on all."""
    lines = [(f"{name}: {_signature(state.get(name))}",) * 2 for name in params]
    device = device_of_mesh(next(iter(params.values())).device_mesh)
    return EXCHANGE.verdict(lines, known, process_group, device)


def _signature(value: Any) -> str:
    """Returns what must be equal on all ranks: of each part its kind and how it is cut."""
    said = []

    def visit(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            local = type(local_shard(tensor))
            what = tensor.dtype if local in PLAIN else local.__name__
            said.append(f"{key} {what} {tuple(tensor.shape)} as {tensor.placements}")
        elif isinstance(tensor, ShardedTensor):
            said.append(f"{key} as a ShardedTensor")
        return tensor

    map_state(visit, value)
    return ", ".join(said) or ("no state" if value is None else "no parts")


def _fill(process_group: dist.ProcessGroup, params: Mapping[str, DTensor], state: _State) -> None:
    """Gives a rank with an empty part, and no state for it, the state that the first rank has."""
    told = [{name: map_tensors(_without_part, state[name]) for name in params if name in state}]
    dist.broadcast_object_list(told, group=process_group, group_src=0)
    for name, value in told[0].items():
        if name not in state and local_shard(params[name]).numel() == 0:
            state[name] = map_tensors(partial(_empty_part, params[name]), value)


def _empty_part(param: DTensor, like: torch.Tensor) -> torch.Tensor:
    if like.device.type != "meta":
        return like
    return as_cut(param, local_shard(param).detach().to(like.dtype))


def _without_part(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return torch.empty(0, dtype=tensor.metadata().tensor_properties.dtype, device="meta")
    if isinstance(tensor, DTensor):
        return torch.empty(0, dtype=tensor.dtype, device="meta")
    return tensor.detach().cpu()
