"""Moves parts of an optimizer's state to the first rank, and from it, one tensor at a time.

Owns the two collectives that ``DTensor`` does not have: parts gathered on one rank alone, and
scattered from it to ranks that may know other meshes. So no other rank ever holds a whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import EXCHANGE, said_of, settle
from fullshard.checkpoint.boxes import Box, box_of, cuts_of
from fullshard.checkpoint.compat import ShardedTensor
from fullshard.checkpoint.parts import map_state, whole
from fullshard.comm import EventKind, check_collective
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.mesh.mesh_info import device_of_mesh

__all__ = ["Sender", "first_rank", "gathered", "sender_of", "without_parts"]

_Params = Mapping[str, torch.Tensor]
_State = dict[str, Any]


def first_rank(params: _Params, group: dist.ProcessGroup | None) -> int:
    """Returns the global number of rank 0 of ``group``, or of the ranks of the model."""
    return min(_ranks_of(params), default=0) if group is None else dist.get_global_rank(group, 0)


def _ranks_of(params: _Params) -> set[int]:
    meshes = {each.device_mesh for each in params.values() if isinstance(each, DTensor)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


def _packed(part: torch.Tensor, numel: int, device: torch.device) -> torch.Tensor:
    """Returns the bytes of ``part``, and of zeros up to ``numel`` elements, in new memory."""
    flat = torch.zeros(numel, dtype=part.dtype, device=device)
    flat[: part.numel()].copy_(part.detach().reshape(-1))
    return flat.view(torch.uint8)


# -- to the first rank ----------------------------------------------------------------------------


def gathered(tensor: DTensor, first: int | None) -> torch.Tensor | None:
    """Returns a copy of the whole tensor on rank ``first``, or on all; None elsewhere.

    Every rank calls it for the same tensors in the same order. The last cut is undone first, by the
    ranks that ``first`` needs for it. Where it is replicated, the others send nothing: they may not
    even know rank ``first``.
    """
    if first is None:
        return whole(tensor)
    mesh, cuts = tensor.device_mesh, cuts_of(tensor)
    own = list(mesh.get_coordinate() or ())  # where in the mesh this rank is
    there: list[int] = (mesh.mesh == first).nonzero().flatten().tolist()
    replicated = {*range(mesh.ndim)} - {cut.axis for cut in cuts}
    if not there or any(own[axis] != there[axis] for axis in replicated):
        return None
    part = local_shard(tensor).detach().to(device_of_mesh(mesh), copy=True)
    for cut in reversed(cuts):
        own[cut.axis] = there[cut.axis]
        to, process_group = int(mesh.mesh[tuple(own)]), mesh.get_group(cut.axis)
        receives = dist.get_rank() == to
        shape = (*part.shape[: cut.dim], cut.size, *part.shape[cut.dim + 1 :])
        joined = torch.empty(shape, dtype=part.dtype, device=part.device if receives else "meta")
        if joined.numel() > 0:
            mine = _packed(part, cut.chunk(joined, 0).numel(), part.device)
            received = [torch.empty_like(mine) for _ in range(cut.count)] if receives else None
            _check(process_group, mine)
            dist.gather(mine, received, dst=to, group=process_group)
            for index, came in enumerate(received or ()):
                chunk = cut.chunk(joined, index)
                chunk.copy_(came.view(part.dtype)[: chunk.numel()].view(chunk.shape))
        if not receives:
            return None
        part = joined
    return part


def _check(process_group: dist.ProcessGroup, sent: torch.Tensor) -> None:
    what = "the state of an optimizer"
    check_collective(EventKind.ALL_GATHER, what, process_group, nbytes=sent.nbytes)


# -- from the first rank --------------------------------------------------------------------------


def _travels(param: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` is sent in parts: it has elements and the parameter's shape."""
    return param is not None and tensor.shape == param.shape and tensor.ndim * tensor.numel() > 0


def without_parts(named: _State, params: _Params) -> _State:
    """Returns the state dict ``named`` with meta tensors for those that travel in parts.

    Raises:
        ValueError: if a tensor is a part itself.
    """

    def leave(name: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, (DTensor, ShardedTensor)):
            raise ValueError(
                f"the state of {name} holds a {type(tensor).__name__}, {key}; scatter a full "
                "state dict, or load shards on every rank"
            )
        travels = _travels(params.get(name), tensor)
        return tensor.detach().to("meta" if travels else "cpu")

    state = named["state"].items()
    return {**named, "state": {name: map_state(partial(leave, name), v) for name, v in state}}


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Over which ranks a state is scattered that the first of them has.

    Attributes:
        process_group: all ranks of the model.
        device: on which tensors travel.
    """

    process_group: dist.ProcessGroup
    device: torch.device

    @property
    def mine(self) -> bool:
        """Whether this rank has the state."""
        return self.process_group.rank() == 0

    def agree(self, error: Exception | None) -> None:
        """Raises ``error``, or ``RankMismatchError`` if another rank found one."""
        settle(error, EXCHANGE.verdict((), said_of(error), self.process_group, self.device))

    def scatter(self, named: _State, outline: _State, params: _Params) -> _State:
        """Returns the first rank's ``named``, of which this rank has its own parts: plain tensors.

        Args:
            named: the state dict; read on the first rank.
            outline: the same ``without_parts``; read on the first rank.
            params: the model's parameters by name.
        """
        own = {name: box_of(param) for name, param in params.items()}
        everyones = [own] * self.process_group.size()
        dist.all_gather_object(everyones, own, group=self.process_group)
        told = [outline]
        dist.broadcast_object_list(told, group=self.process_group, group_src=0)

        def take(name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
            if _travels(params.get(name), tensor):
                return self._part(tensor, own[name], [each[name] for each in everyones])
            return tensor.detach().cpu()

        state = (named if self.mine else told[0])["state"].items()
        taken = {name: map_state(partial(take, name), value) for name, value in state}
        return {**told[0], "state": taken}

    def _part(self, full: torch.Tensor, own: Box, everyones: Sequence[Box]) -> torch.Tensor:
        """Returns this rank's part of the first rank's ``full``; all ranks know all boxes."""
        numel = max(box.numel for box in everyones)
        received = torch.empty(numel * full.itemsize, dtype=torch.uint8, device=self.device)
        sent = None
        if self.mine:
            packed = {box: _packed(box.of(full), numel, self.device) for box in {*everyones}}
            sent = [packed[box] for box in everyones]
        _check(self.process_group, received)
        dist.scatter(received, sent, group=self.process_group, group_src=0)
        return received.view(full.dtype)[: own.numel].view(own.size).clone()


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
    return Sender(process_group=group, device=device)
