"""Moves parts of an optimizer's state to the first rank, and from it, one tensor at a time.

Owns the two collectives that ``DTensor`` does not have: chunks gathered on one rank alone, and
scattered from it to ranks that may know other meshes. So no other rank ever holds a whole tensor,
unless it is cut otherwise (strided, or over several axes: tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from fullshard.checkpoint.agreement import EXCHANGE, said_of
from fullshard.checkpoint.compat import ShardedTensor
from fullshard.checkpoint.parts import as_cut, map_state, whole
from fullshard.comm import EventKind, check_collective
from fullshard.sharding import RankMismatchError
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.mesh.mesh_info import device_of_mesh

__all__ = ["Chunks", "Sender", "first_rank", "gathered", "sender_of", "without_parts"]

_Params = Mapping[str, torch.Tensor]


def first_rank(params: _Params, group: dist.ProcessGroup | None) -> int:
    """Returns the global number of rank 0 of ``group``, or of the ranks of the model."""
    return min(_ranks_of(params), default=0) if group is None else dist.get_global_rank(group, 0)


def _ranks_of(params: _Params) -> set[int]:
    meshes = {each.device_mesh for each in params.values() if isinstance(each, DTensor)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


@dataclass(frozen=True)
class Chunks:
    """How tensors are cut by ``torch.chunk``'s rule over one axis of a mesh; else one chunk each.

    Attributes:
        process_group: the ranks that have the chunks; None if each rank has all, or they are cut
            otherwise.
        count: how many there are.
        index: which this rank has.
        dim: along which tensors are cut.
    """

    process_group: dist.ProcessGroup | None = None
    count: int = 1
    index: int = 0
    dim: int = 0

    @classmethod
    def of(cls, param: torch.Tensor) -> Chunks:
        """Returns how ``param`` is cut, and so tensors of its shape."""
        if isinstance(param, DTensor):
            mesh = param.device_mesh
            cut = [axis for axis, at in enumerate(param.placements) if not at.is_replicate()]
            placed = param.placements[cut[0]] if len(cut) == 1 else None
            if type(placed) is Shard:
                (axis,) = cut
                return cls(
                    mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), placed.dim
                )
        return cls()

    def of_whole(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Returns the chunks of ``full``, views; the last may be empty."""
        chunks = list(full.chunk(self.count, self.dim))
        return chunks + [full.narrow(self.dim, 0, 0)] * (self.count - len(chunks))


def _packed(part: torch.Tensor, numel: int, device: torch.device) -> torch.Tensor:
    """Returns the bytes of ``part``, and of zeros up to ``numel`` elements, in new memory."""
    flat = torch.zeros(numel, dtype=part.dtype, device=device)
    flat[: part.numel()].copy_(part.detach().reshape(-1))
    return flat.view(torch.uint8)


# -- to the first rank ----------------------------------------------------------------------------


def gathered(tensor: DTensor, first: int | None) -> torch.Tensor | None:
    """Returns a copy of the whole tensor on rank ``first``, or on all; None elsewhere.

    Every rank calls it for the same tensors in the same order. Where it is replicated, the others
    send nothing: they may not even know rank ``first``.
    """
    chunks = Chunks.of(tensor)
    if first is None or chunks.process_group is None or tensor.numel() == 0:
        full = whole(tensor)
        return full if first is None or first == dist.get_rank() else None
    ranks = dist.get_process_group_ranks(chunks.process_group)
    if first not in ranks:
        return None
    receives, device = dist.get_rank() == first, device_of_mesh(tensor.device_mesh)
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device if receives else "meta")
    parts = chunks.of_whole(full)
    mine = _packed(local_shard(tensor), parts[0].numel(), device)
    received = [torch.empty_like(mine) for _ in ranks] if receives else None
    _check(chunks.process_group, mine)
    dist.gather(mine, received, dst=first, group=chunks.process_group)
    for part, came in zip(parts, received or (), strict=receives):
        part.copy_(came.view(part.dtype)[: part.numel()].view(part.shape))
    return full if receives else None


def _check(process_group: dist.ProcessGroup, sent: torch.Tensor) -> None:
    what = "the state of an optimizer"
    check_collective(EventKind.ALL_GATHER, what, process_group, nbytes=sent.nbytes)


# -- from the first rank --------------------------------------------------------------------------


def without_parts(
    state: Mapping[Any, Any], params: _Params, sent: list[torch.Tensor]
) -> dict[Any, Any]:
    """Returns ``state`` with meta tensors for those that travel in parts; ``sent`` gains these.

    Raises:
        ValueError: if a tensor is a part itself.
    """

    def leave(name: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, (DTensor, ShardedTensor)):
            raise ValueError(
                f"the state of {name} holds a {type(tensor).__name__}, {key}; scatter a full "
                "state dict, or load shards on every rank"
            )
        param = params.get(name)
        if param is None or tensor.shape != param.shape or tensor.ndim * tensor.numel() == 0:
            return tensor.detach().cpu()
        sent.append(tensor.detach())
        return torch.empty_like(tensor, device="meta")

    return {name: map_state(partial(leave, name), value) for name, value in state.items()}


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Over which ranks a state is scattered, and who has it.

    Attributes:
        process_group: all ranks of the model.
        first: the one that has the state, by its global number.
        device: on which tensors travel.
    """

    process_group: dist.ProcessGroup
    first: int
    device: torch.device

    @property
    def mine(self) -> bool:
        """Whether this rank has the state."""
        return dist.get_rank() == self.first

    def scatter(
        self,
        named: dict[str, Any],
        sent: Sequence[torch.Tensor],
        params: _Params,
        error: Exception | None,
    ) -> dict[str, Any]:
        """Returns the first rank's ``named``, of which this rank has its own parts.

        Args:
            named: without parts; read on the first rank.
            sent: the first rank's tensors that travel, in the order in which they were left out.
            params: the model's parameters by name.
            error: what this rank found wrong.

        Raises:
            RankMismatchError: on all ranks that found nothing, if one did.
            Exception: ``error``.
        """
        verdict = EXCHANGE.verdict((), said_of(error), self.process_group, self.device)
        if error is not None:
            raise error
        if verdict:
            raise RankMismatchError(verdict)
        own = [Chunks.of(each).index for each in params.values()]
        everyones: list[list[int]] = [own] * self.process_group.size()
        dist.all_gather_object(everyones, own, group=self.process_group)
        told = [named]
        dist.broadcast_object_list(told, src=self.first, group=self.process_group)
        indices = dict(zip(params, zip(*everyones, strict=True), strict=True))
        left = iter(sent)

        def take(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "meta":
                return tensor
            return self._part(params[name], tensor, next(left, None), indices[name])

        state = {name: map_state(partial(take, name), v) for name, v in told[0]["state"].items()}
        return {**told[0], "state": state}

    def _part(
        self, param: torch.Tensor, like: torch.Tensor, full: torch.Tensor | None, at: Sequence[int]
    ) -> torch.Tensor:
        """Returns this rank's part of ``full``; ``at``: the index of each rank's chunk."""
        chunks = Chunks.of(param)
        parts = chunks.of_whole(like if full is None else full)
        numel, mine = parts[0].numel(), parts[chunks.index]
        received = torch.empty(numel * like.itemsize, dtype=torch.uint8, device=self.device)
        sent = None
        if full is not None:
            packed = {each: _packed(parts[each], numel, self.device) for each in {*at}}
            sent = [packed[each] for each in at]
        _check(self.process_group, received)
        dist.scatter(received, sent, src=self.first, group=self.process_group)
        part = received.view(like.dtype)[: mine.numel()].view(mine.shape).clone()
        return part if chunks.process_group is None else as_cut(param, part)


def sender_of(params: _Params, group: dist.ProcessGroup | None) -> Sender | None:
    """Returns who scatters to whom; None if there is one rank only.

    Raises:
        ValueError: if the model is not on all ranks, its mesh has several axes, and ``group`` is
            None.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    meshes = list({each.device_mesh for each in params.values() if isinstance(each, DTensor)})
    if group is None and len(meshes) == 1 and meshes[0].ndim == 1:
        group = meshes[0].get_group()
    if group is None:
        if meshes and _ranks_of(params) != set(range(dist.get_world_size())):
            raise ValueError(
                "the model is not on all ranks, and its mesh has several axes; pass as group a "
                "process group of its ranks"
            )
        group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    device = device_of_mesh(meshes[0]) if meshes else torch.device("cpu")
    return Sender(process_group=group, first=dist.get_global_rank(group, 0), device=device)
