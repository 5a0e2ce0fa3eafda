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
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.compat import ShardedTensor
from fullshard.checkpoint.parts import Chunks, as_cut, map_state, whole
from fullshard.comm import EventKind, check_collective
from fullshard.sharding import RankMismatchError
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.mesh.mesh_info import device_of_mesh

__all__ = ["Sender", "first_rank", "gathered", "sender_of", "without_parts"]

_Params = Mapping[str, torch.Tensor]


def first_rank(params: _Params, group: dist.ProcessGroup | None) -> int:
    """Returns the global number of rank 0 of ``group``, or of the ranks of the model."""
    return min(_ranks_of(params), default=0) if group is None else dist.get_global_rank(group, 0)


def _ranks_of(params: _Params) -> set[int]:
    meshes = {each.device_mesh for each in params.values() if isinstance(each, DTensor)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


# -- to the first rank ----------------------------------------------------------------------------


def gathered(tensor: DTensor, first: int | None) -> torch.Tensor | None:
    """Returns a copy of the whole tensor on rank ``first``, or on all; None elsewhere.

    Every rank calls it for the same tensors in the same order. Where it is replicated, the others
    send nothing: they may not even know rank ``first``.
    """
    chunks = Chunks.of(tensor, tensor)
    if first is None or chunks.process_group is None or tensor.numel() == 0:
        full = whole(tensor)
        return full if first is None or first == dist.get_rank() else None
    ranks = dist.get_process_group_ranks(chunks.process_group)
    if first not in ranks:
        return None
    mine = chunks.pack(local_shard(tensor), device_of_mesh(tensor.device_mesh))
    received = [torch.empty_like(mine) for _ in ranks] if dist.get_rank() == first else None
    _check(chunks.process_group, mine)
    dist.gather(mine, received, dst=first, group=chunks.process_group)
    if received is None:
        return None
    parts = [chunks.unpack(each, chunks.rows_of(index)) for index, each in enumerate(received)]
    return torch.cat(parts, chunks.dim)


def _check(process_group: dist.ProcessGroup, packed: torch.Tensor) -> None:
    what = "the state of an optimizer"
    check_collective(EventKind.ALL_GATHER, what, process_group, nbytes=packed.nbytes)


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
        said = "" if error is None else f"{type(error).__name__}: {error}"
        mine = (said, [Chunks.of(each, each).index for each in params.values()])
        everyone: list[Any] = [None] * self.process_group.size()
        dist.all_gather_object(everyone, mine, group=self.process_group)
        errors = [text for text, _ in everyone if text]
        if error is not None:
            raise error
        if errors:
            raise RankMismatchError(f"the optimizer's state cannot be scattered: {errors[0]}")
        told = [named]
        dist.broadcast_object_list(told, src=self.first, group=self.process_group)
        indices = zip(*(found for _, found in everyone), strict=True)
        indices_of, left = dict(zip(params, indices, strict=True)), iter(sent)

        def take(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "meta":
                return tensor
            chunks = Chunks.of(params[name], tensor)
            return self._part(params[name], chunks, next(left, None), indices_of[name])

        state = {name: map_state(partial(take, name), v) for name, v in told[0]["state"].items()}
        return {**told[0], "state": state}

    def _part(
        self,
        param: torch.Tensor,
        chunks: Chunks,
        full: torch.Tensor | None,
        indices: Sequence[int],
    ) -> torch.Tensor:
        """Returns this rank's part of ``full``, which the first rank has; all of it if not cut."""
        nbytes = chunks.longest.numel() * chunks.dtype.itemsize
        packed = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        parts = None
        if full is not None:
            cut = {at: chunks.pack(chunks.chunk(full, at), self.device) for at in {*indices}}
            parts = [cut[at] for at in indices]
        _check(self.process_group, packed)
        dist.scatter(packed, parts, src=self.first, group=self.process_group)
        part = chunks.unpack(packed, chunks.rows_of(chunks.index)).clone()
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
