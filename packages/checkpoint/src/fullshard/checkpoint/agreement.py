"""What ranks must agree on before the state of an optimizer travels.

Owns one exchange of a digest per process group over which a sharded parameter of the optimizer is
spread. Where digests differ, ranks tell each other what they have: every rank raises alike, or a
rank that has no part of a parameter, and so no state of it, is given what the others say of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.leaves import as_cut, leaves_of
from fullshard.comm import EventKind, check_collective
from fullshard.sharding.base.compat import ShardedTensor, local_shard
from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.hooks.agreement import RankMismatchError
from fullshard.sharding.mesh.mesh_info import device_of_mesh

__all__ = ["agree", "meshes_of"]

_State = dict[str, Any]


def meshes_of(params: Mapping[str, torch.Tensor]) -> dict[DeviceMesh, list[str]]:
    """Returns the meshes over which ``params`` are spread, and which of them are on each."""
    found: dict[DeviceMesh, list[str]] = {}
    for name, param in params.items():
        if isinstance(param, DTensor):
            found.setdefault(param.device_mesh, []).append(name)
    return found


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
    verdict = "" if error is None else f"{type(error).__name__}: {error}"
    exchanges: dict[dist.ProcessGroup, _Exchange] = {}
    for mesh, names in meshes_of(params).items():
        for process_group in mesh.get_all_groups():
            new = _Exchange(process_group, device_of_mesh(mesh), params, [])
            exchanges.setdefault(process_group, new).names.extend(names)
    for process_group, exchange in exchanges.items():
        if process_group.size() > 1:
            verdict = exchange.verdict(state, verdict)
    if error is not None:
        raise error
    if verdict:
        raise RankMismatchError(verdict)


@dataclass(frozen=True)
class _Exchange:
    """One process group, and the parameters that are spread over it."""

    process_group: dist.ProcessGroup
    device: torch.device
    params: Mapping[str, torch.Tensor]
    names: list[str]

    def verdict(self, state: _State, known: str) -> str:
        """Returns what is wrong on any rank; nothing if nothing is."""
        mine = {name: _signature(state[name]) for name in self.names if name in state}
        if not self._differs([known, *(f"{name}: {line}" for name, line in mine.items())]):
            return known
        empty = {name for name in self.names if local_shard(self.params[name]).numel() == 0}
        everyone = self._gather((known, mine, empty))
        verdicts = {rank: said[0] for rank, said in everyone.items() if said[0]}
        if verdicts:
            return "the optimizer's state cannot be exchanged, as some ranks found an error; " + (
                "; ".join(f"rank {rank}: {text}" for rank, text in verdicts.items())
            )
        difference = _difference(self.names, everyone)
        if not difference:
            self._fill(state, everyone)
        return difference

    def _differs(self, lines: Sequence[str]) -> bool:
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        number = int.from_bytes(digest[:8], signed=True)
        mine = torch.tensor([number], dtype=torch.int64, device=self.device)
        found = [mine.clone() for _ in range(self.process_group.size())]
        check_collective(
            EventKind.ALL_GATHER,
            "the agreement on an optimizer's state",
            self.process_group,
            nbytes=mine.nbytes,
        )
        dist.all_gather(found, mine, group=self.process_group)
        return not bool((torch.cat(found) == mine).all())

    def _gather(self, mine: Any) -> dict[int, Any]:
        everyone: list[Any] = [None] * self.process_group.size()
        dist.all_gather_object(everyone, mine, group=self.process_group)
        return dict(zip(dist.get_process_group_ranks(self.process_group), everyone, strict=True))

    def _fill(self, state: _State, everyone: dict[int, Any]) -> None:
        """Gives ranks with an empty part the state that the first rank with one says there is."""
        sources = {}
        for name in self.names:
            having = [rank for rank, (_, mine, _) in everyone.items() if name in mine]
            if having and len(having) < len(everyone):
                sources[name] = having[0]
        mine = {
            name: map_tensors(_without_part, state[name])
            for name, rank in sources.items()
            if rank == dist.get_rank()
        }
        told = self._gather(mine)
        for name, rank in sources.items():
            if name not in state:
                param = self.params[name]

                def part(tensor: torch.Tensor, param: torch.Tensor = param) -> torch.Tensor:
                    if tensor.device.type != "meta":
                        return tensor
                    return as_cut(param, local_shard(param).detach().to(tensor.dtype))

                state[name] = map_tensors(part, told[rank][name])


def _without_part(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return torch.empty(0, dtype=tensor.dtype, device="meta")
    return tensor.detach().cpu()


def _signature(value: Any) -> str:
    """Returns what must be equal on all ranks: of each part its kind and how it is cut."""
    said = []
    for path, leaf in leaves_of(value):
        if isinstance(leaf, DTensor):
            said.append(f"{path or 'state'} {leaf.dtype} {tuple(leaf.shape)} as {leaf.placements}")
        elif isinstance(leaf, ShardedTensor):
            said.append(f"{path or 'state'} as a ShardedTensor")
    return "; ".join(said)


def _difference(names: Sequence[str], everyone: dict[int, Any]) -> str:
    """Returns the first parameter of which ranks have other kinds of state; nothing if none."""
    for name in names:
        said = {rank: mine.get(name) for rank, (_, mine, _) in everyone.items()}
        lacking = {rank for rank, line in said.items() if line is None}
        excused = all(name in everyone[rank][2] for rank in lacking)
        lines = {line for line in said.values() if line is not None}
        if len(lines) > 1 or (lines and not excused):
            words = "; ".join(
                f"rank {rank} has {'no state' if line is None else line or 'no tensors'}"
                for rank, line in said.items()
            )
            return (
                f"ranks disagree on the optimizer's state of {name}: {words}. Step the same "
                "optimizer on the same parameters on every rank"
            )
    return ""
