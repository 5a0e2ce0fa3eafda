"""What ranks must agree on before the state of an optimizer travels.

Owns one exchange of a digest per process group over which a sharded parameter of the optimizer is
spread. Where digests differ, ranks tell each other what they have: every rank raises alike, or a
rank that has no part of a parameter, and so no state of it, is given what the others say of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.compat import ShardedTensor
from fullshard.checkpoint.parts import as_cut, map_state
from fullshard.sharding import RankMismatchError, map_tensors
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.hooks.agreement import digests_differ
from fullshard.sharding.mesh.mesh_info import device_of_mesh

__all__ = ["agree"]

_Params = Mapping[str, torch.Tensor]
_Said = tuple[str, dict[str, str], set[str]]  # an error; of each name its state; names of no rows


def agree(params: _Params, state: dict[str, Any], error: Exception | None) -> None:
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
    verdict = "" if error is None else f"{type(error).__name__}: {error}"
    exchanges: dict[dist.ProcessGroup, dict[str, DTensor]] = {}
    for name, param in params.items():
        if isinstance(param, DTensor):
            for process_group in param.device_mesh.get_all_groups():
                exchanges.setdefault(process_group, {})[name] = param
    for process_group, spread in exchanges.items():
        verdict = _verdict(process_group, spread, state, verdict)
    if error is not None:
        raise error
    if verdict:
        raise RankMismatchError(verdict)


def _verdict(
    process_group: dist.ProcessGroup,
    params: Mapping[str, DTensor],
    state: dict[str, Any],
    known: str,
) -> str:
    """Returns what is wrong on any rank; nothing if nothing is."""
    said = {name: _signature(state[name]) for name in params if name in state}
    lines = [known, *(f"{name}: {line}" for name, line in said.items())]
    device = device_of_mesh(next(iter(params.values())).device_mesh)
    if not digests_differ(lines, process_group, device, "the agreement on an optimizer's state"):
        return known
    empty = {name for name, param in params.items() if local_shard(param).numel() == 0}
    everyone: dict[int, _Said] = _exchanged((known, said, empty), process_group)
    errors = [f"rank {rank}: {text}" for rank, (text, _, _) in everyone.items() if text]
    if errors:
        return (
            "the optimizer's state cannot be exchanged, as some ranks found an error; "
            + "; ".join(errors)
        )
    difference = _difference(params, everyone)
    if not difference:
        _fill(process_group, params, state, everyone)
    return difference


def _exchanged(mine: Any, process_group: dist.ProcessGroup) -> dict[int, Any]:
    everyone: list[Any] = [None] * process_group.size()
    dist.all_gather_object(everyone, mine, group=process_group)
    return dict(zip(dist.get_process_group_ranks(process_group), everyone, strict=True))


def _signature(value: Any) -> str:
    """Returns what must be equal on all ranks: of each part its kind and how it is cut."""
    said = []

    def visit(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            shape, cut = tuple(tensor.shape), tensor.placements
            said.append(f"{key or 'state'} {tensor.dtype} {shape} as {cut}")
        elif isinstance(tensor, ShardedTensor):
            said.append(f"{key or 'state'} as a ShardedTensor")
        return tensor

    map_state(visit, value)
    return "; ".join(said)


def _difference(names: Iterable[str], everyone: dict[int, _Said]) -> str:
    """Returns the first parameter of which ranks have other kinds of state; nothing if none."""
    for name in names:
        said = {rank: signatures.get(name) for rank, (_, signatures, _) in everyone.items()}
        lacking = [rank for rank, line in said.items() if line is None]
        excused = all(name in everyone[rank][2] for rank in lacking)
        kinds = {line for line in said.values() if line is not None}
        if len(kinds) > 1 or (kinds and not excused):
            words = "; ".join(
                f"rank {rank} has {'no state' if line is None else line or 'no tensors'}"
                for rank, line in said.items()
            )
            return (
                f"ranks disagree on the optimizer's state of {name}: {words}. Step the same "
                "optimizer on the same parameters on every rank"
            )
    return ""


def _fill(
    process_group: dist.ProcessGroup,
    params: Mapping[str, DTensor],
    state: dict[str, Any],
    everyone: dict[int, _Said],
) -> None:
    """Gives ranks with an empty part the state that the first rank with one says there is."""
    sources = {}
    for name in params:
        having = [rank for rank, (_, signatures, _) in everyone.items() if name in signatures]
        if 0 < len(having) < len(everyone):
            sources[name] = having[0]
    me = dist.get_rank()
    mine = {
        name: map_tensors(_without_part, state[name]) for name in sources if sources[name] == me
    }
    told = _exchanged(mine, process_group)
    for name, rank in sources.items():
        if name not in state:
            state[name] = map_tensors(_empty_part(params[name]), told[rank][name])


def _without_part(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return torch.empty(0, dtype=tensor.dtype, device="meta")
    return tensor.detach().cpu()


def _empty_part(param: DTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def part(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta":
            return tensor
        return as_cut(param, local_shard(param).detach().to(tensor.dtype))

    return part
