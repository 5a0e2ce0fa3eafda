"""Moves parts of an optimizer's state to the first rank, and from it, one tensor at a time.

Owns the two collectives that ``DTensor`` does not have: chunks gathered on one rank alone, and
scattered from it to ranks that may know other meshes. So no other rank ever holds a whole tensor,
unless it is cut otherwise (strided, or over several axes: tensor parallelism). Where chunks lie in
a collective, a layout of ``fullshard.comm`` says.
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
from fullshard.comm.layouts.layout import TensorSpec
from fullshard.comm.layouts.rank_major import RankMajorLayout
from fullshard.comm.layouts.views import shard_views
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
    """One tensor in plain chunks over one axis of a mesh, by ``torch.chunk``'s rule.

    Attributes:
        layout: of that tensor alone; of one rank, if it is not cut, or not in plain chunks.
        process_group: the ranks that have the chunks; None in that case.
        index: which chunk this rank has.
    """

    layout: RankMajorLayout
    process_group: dist.ProcessGroup | None = None
    index: int = 0

    @classmethod
    def of(cls, param: torch.Tensor, like: torch.Tensor) -> Chunks:
        """Returns how a tensor of the shape and dtype of ``like`` is cut as ``param`` is."""
        if isinstance(param, DTensor):
            cut = [axis for axis, at in enumerate(param.placements) if not at.is_replicate()]
            mesh, placed = param.device_mesh, param.placements[cut[0]] if len(cut) == 1 else None
            if type(placed) is Shard and mesh.size(cut[0]) > 1:
                spec = TensorSpec(shape=like.shape, dtype=like.dtype, dim=placed.dim)
                layout = RankMajorLayout([spec], mesh.size(cut[0]))
                return cls(layout, mesh.get_group(cut[0]), mesh.get_local_rank(cut[0]))
        return cls(RankMajorLayout([TensorSpec(shape=like.shape, dtype=like.dtype)], 1))

    def slice(self, device: torch.device) -> torch.Tensor:
        """Returns memory for any one chunk; all take as much as the first."""
        buffer = self.layout.buffer
        return torch.zeros(buffer.slice_numel, dtype=buffer.dtype, device=device)

    def chunk(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Returns chunk ``index`` in what ``slice`` gave: a view."""
        return shard_views(flat, self.layout, index)[0]

    def packed(self, full: torch.Tensor, index: int, device: torch.device) -> torch.Tensor:
        """Returns a slice that holds chunk ``index`` of ``full``."""
        flat, (spec,) = self.slice(device), self.layout.specs
        chunk, first = self.chunk(flat, index), spec.first_row(index, self.layout.world_size)
        chunk.copy_(full.narrow(spec.dim, first, chunk.shape[spec.dim]))
        return flat


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
    mine = chunks.slice(device_of_mesh(tensor.device_mesh))
    chunks.chunk(mine, chunks.index).copy_(local_shard(tensor))
    slices = [torch.empty_like(mine) for _ in ranks] if dist.get_rank() == first else None
    _check(chunks.process_group, mine)
    received = None if slices is None else [each.view(torch.uint8) for each in slices]
    dist.gather(mine.view(torch.uint8), received, dst=first, group=chunks.process_group)
    if slices is None:
        return None
    found = [chunks.chunk(each, index) for index, each in enumerate(slices)]
    return torch.cat(found, chunks.layout.specs[0].dim)


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
        own = [Chunks.of(each, each).index for each in params.values()]
        everyones: list[list[int]] = [own] * self.process_group.size()
        dist.all_gather_object(everyones, own, group=self.process_group)
        told = [named]
        dist.broadcast_object_list(told, src=self.first, group=self.process_group)
        indices = dict(zip(params, zip(*everyones, strict=True), strict=True))
        left = iter(sent)

        def take(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "meta":
                return tensor
            chunks = Chunks.of(params[name], tensor)
            return self._part(params[name], chunks, next(left, None), indices[name])

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
        received, sent = chunks.slice(self.device).view(torch.uint8), None
        if full is not None:
            packed = {at: chunks.packed(full, at, self.device) for at in {*indices}}
            sent = [packed[at].view(torch.uint8) for at in indices]
        _check(self.process_group, received)
        dist.scatter(received, sent, src=self.first, group=self.process_group)
        flat = received.view(chunks.layout.buffer.dtype)
        part = chunks.chunk(flat, chunks.index).clone()
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
