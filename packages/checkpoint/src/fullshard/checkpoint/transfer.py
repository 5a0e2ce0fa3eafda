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

from fullshard.checkpoint.agreement import EXCHANGE, agree_over
from fullshard.checkpoint.boxes import Box, box_of, cuts_of
from fullshard.checkpoint.parts import PLAIN, map_state, whole
from fullshard.checkpoint.process_groups import ranks_of
from fullshard.comm import EventKind, check_collective
from fullshard.sharding.base.compat import local_shard
from fullshard.sharding.mesh.mesh_info import device_of_mesh

__all__ = ["Sender", "first_rank", "gathered", "sender_of", "without_parts"]

_Params = Mapping[str, torch.Tensor]
_State = dict[str, Any]


def first_rank(params: _Params, group: dist.ProcessGroup | None) -> int:
    """Returns the global number of rank 0 of ``group``, or of the ranks of the model."""
    return min(ranks_of(params), default=0) if group is None else dist.get_global_rank(group, 0)


def _check(process_group: dist.ProcessGroup, sent: torch.Tensor) -> None:
    what = "the state of an optimizer"
    check_collective(EventKind.ALL_GATHER, what, process_group, nbytes=sent.nbytes)


# -- to the first rank ----------------------------------------------------------------------------


def gathered(tensor: DTensor, first: int | None) -> torch.Tensor | None:
    """Returns a copy of the whole tensor on rank ``first``, or on all; None elsewhere.

    Every rank calls it for the same tensors in the same order. The last cut is undone first, by the
    ranks that ``first`` needs for it. Where it is replicated, the others send nothing: they may not
    even know rank ``first``. Sums that are not added up yet, and shards of a class of their own,
    travel as ``DTensor`` sends them: to every rank.
    """
    is_sum = any(placement.is_partial() for placement in tensor.placements)
    if first is None or is_sum or type(local_shard(tensor)) not in PLAIN:
        full = whole(tensor)
        return full if first is None or dist.get_rank() == first else None
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
        mine = part.new_zeros((*part.shape[: cut.dim], cut.span(0)[1], *part.shape[cut.dim + 1 :]))
        mine.narrow(cut.dim, 0, part.size(cut.dim)).copy_(part)
        mine = mine.view(torch.uint8)  # gloo knows fewer dtypes
        came = [torch.empty_like(mine) for _ in range(cut.count)] if dist.get_rank() == to else None
        if mine.numel() > 0:
            _check(process_group, mine)
            dist.gather(mine, came, dst=to, group=process_group)
        if came is None:
            return None
        part = torch.cat(came, cut.dim).view(part.dtype).narrow(cut.dim, 0, cut.size)
    return part.contiguous()


# -- from the first rank --------------------------------------------------------------------------


def _travels(param: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` is sent in parts: it has elements and the parameter's shape."""
    return param is not None and tensor.shape == param.shape and tensor.ndim * tensor.numel() > 0


def without_parts(named: _State, params: _Params) -> _State:
    """Returns the state dict ``named`` with meta tensors for those that travel in parts.

    Raises:
        ValueError: if a tensor is a part itself, or of a class of its own.
    """

    def leave(name: Any, key: str, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in PLAIN:
            raise ValueError(
                f"the state of {name} holds a {type(tensor).__name__}, {key}; scatter a full state "
                "dict of plain tensors, or load it on every rank"
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
        agree_over(EXCHANGE, self.process_group, self.device, (), error)

    def scatter(self, named: _State, outline: _State, params: _Params) -> _State:
        """Returns the first rank's ``named``, of which this rank has its own parts: plain tensors.

        Args:
            named: the state dict; read on the first rank.
            outline: the same ``without_parts``; read on the first rank.
            params: the model's parameters by name.
        """
        told = ({name: box_of(param) for name, param in params.items()}, outline)
        everyone = [told] * self.process_group.size()
        dist.all_gather_object(everyone, told, group=self.process_group)
        outline = everyone[0][1]

        def take(name: str, _: str, tensor: torch.Tensor) -> torch.Tensor:
            if _travels(params.get(name), tensor):
                return self._part(tensor, [boxes[name] for boxes, _ in everyone])
            return tensor.detach().cpu()

        state = (named if self.mine else outline)["state"].items()
        taken = {name: map_state(partial(take, name), value) for name, value in state}
        return {**outline, "state": taken}

    def _part(self, full: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
        """Returns this rank's part of the first rank's ``full``; ``boxes``: of each rank."""
        own, numel = boxes[self.process_group.rank()], max(box.numel for box in boxes)
        received = torch.empty(numel * full.itemsize, dtype=torch.uint8, device=self.device)
        packed: dict[Box, torch.Tensor] = {}
        for box in {*boxes} if self.mine else ():
            flat = torch.zeros(numel, dtype=full.dtype, device=self.device)
            flat[: box.numel].view(box.size).copy_(box.of(full.detach()))
            packed[box] = flat.view(torch.uint8)
        sent = [packed[box] for box in boxes] if self.mine else None
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
        if meshes and ranks_of(params) != set(range(dist.get_world_size())):
            raise ValueError(
                "the model is not on all ranks, and its mesh has several axes; pass as group a "
                "process group of its ranks"
            )
        group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialised"
    device = device_of_mesh(meshes[0]) if meshes else torch.device("cpu")
    return Sender(process_group=group, device=device)
