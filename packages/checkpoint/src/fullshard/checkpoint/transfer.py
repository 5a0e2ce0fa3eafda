"""Moves parts of an optimizer's state to the first rank, and from it, one tensor at a time.

Owns the two collectives that ``DTensor`` does not have: parts gathered on one rank alone, and
scattered from it to ranks that may know other meshes. Therefore no other rank holds a whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.agreement import EXCHANGE, agree_over
from fullshard.checkpoint.boxes import Box, box_of, cuts_of
from fullshard.checkpoint.names import StateDict
from fullshard.checkpoint.parts import Place, loadable, map_state, whole
from fullshard.checkpoint.process_groups import ranks_of
from fullshard.comm import EventKind, check_collective, waiting
from fullshard.comm.spi import carrier_of
from fullshard.sharding.spi import device_of_mesh, is_plain, local_shard

__all__ = ["Sender", "first_rank", "gathered", "require_plain", "scattered", "sender_of"]

_Params = Mapping[str, torch.Tensor]


def first_rank(params: _Params, group: dist.ProcessGroup | None) -> int:
    """Return the global number of rank 0 of ``group``, or of the ranks of the model."""
    return min(ranks_of(params), default=0) if group is None else dist.get_global_rank(group, 0)


def _check(process_group: dist.ProcessGroup, sent: torch.Tensor) -> None:
    what = "the state of an optimizer"
    check_collective(EventKind.ALL_GATHER, what, process_group, nbytes=sent.nbytes)


# -- to the first rank ----------------------------------------------------------------------------


def gathered(tensor: DTensor, first: int | None) -> torch.Tensor | None:
    """Return a copy of the whole tensor on rank ``first``, or on all; None elsewhere.

    Call it on every rank, with equal tensors in one order. The last cut is undone first, by the
    ranks that ``first`` needs for it. Where it is replicated, the others send nothing: they may not
    even know rank ``first``. Partial sums, and shards of a user's subclass, travel as ``DTensor``
    sends them: to every rank.
    """
    is_sum = any(placement.is_partial() for placement in tensor.placements)
    if first is None or is_sum or not is_plain(local_shard(tensor)):
        full = whole(tensor)
        return full if first is None or dist.get_rank() == first else None
    mesh, cuts = tensor.device_mesh, cuts_of(tensor)
    here, there = mesh.get_coordinate() or (), (mesh.mesh == first).nonzero().flatten().tolist()
    replicated = {*range(mesh.ndim)} - {cut.axis for cut in cuts}
    if not there or any(here[axis] != there[axis] for axis in replicated):
        return None
    device = device_of_mesh(mesh)
    part = local_shard(tensor).detach().to(carrier_of(mesh.get_group(0), device), copy=True)
    for cut in reversed(cuts):
        process_group, to = mesh.get_group(cut.axis), there[cut.axis]
        mine = part.new_zeros((*part.shape[: cut.dim], cut.span(0)[1], *part.shape[cut.dim + 1 :]))
        mine.narrow(cut.dim, 0, part.size(cut.dim)).copy_(part)
        mine = mine.view(torch.uint8)  # gloo knows fewer dtypes
        came = [torch.empty_like(mine) for _ in range(cut.count)] if cut.index == to else None
        if mine.numel() > 0:
            _check(process_group, mine)
            with waiting("optimizer state"):
                dist.gather(mine, came, group=process_group, group_dst=to)
        if came is None:
            return None
        part = torch.cat(came, cut.dim).view(part.dtype).narrow(cut.dim, 0, cut.size)
    return part.contiguous().to(device)


# -- from the first rank --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Over which ranks travels what the first of them has.

    Attributes:
        process_group: all ranks of the model.
        device: the carrier of ``process_group``: the device on which tensors travel.
    """

    process_group: dist.ProcessGroup
    device: torch.device

    @property
    def mine(self) -> bool:
        """Whether this rank is the first."""
        return self.process_group.rank() == 0

    def agree(self, error: Exception | None) -> None:
        """Raise ``error``, or ``RankMismatchError`` if another rank found one."""
        agree_over(EXCHANGE, self.process_group, self.device, (), error)


def sender_of(params: _Params, group: dist.ProcessGroup | None) -> Sender | None:
    """Return the plan of a scatter, with its sender; None if there is one rank only.

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
    return Sender(process_group=group, device=carrier_of(group, device))


def require_plain(at: Place, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, which can be scattered.

    Raises:
        ValueError: if it is a part itself, or of a class of its own.
    """
    if not is_plain(tensor):
        raise ValueError(
            f"the state of {at.name} holds a {type(tensor).__name__}, {at.key}; scatter a full "
            "state dict of plain tensors, or load it on every rank"
        )
    return tensor.detach()


def scattered(sender: Sender, params: _Params, named: StateDict) -> StateDict:
    """Return the first rank's state dict ``named``, of which this rank has its own parts.

    Args:
        sender: who has it.
        params: the model's parameters by name.
        named: of plain tensors; read on the first rank.
    """

    def outline(at: Place, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta" if _travels(at, tensor) else "cpu")

    def take(at: Place, tensor: torch.Tensor) -> torch.Tensor:
        if _travels(at, tensor):
            tensor = _part(sender, tensor, [boxes[at.name] for boxes, _ in everyone])
        return loadable(at, tensor)

    outlined = {**named, "state": map_state(outline, params, named["state"])}
    everyone = [({name: box_of(param) for name, param in params.items()}, outlined)]
    everyone *= sender.process_group.size()
    with waiting("optimizer state"):
        dist.all_gather_object(everyone, everyone[0], group=sender.process_group)
    known = named if sender.mine else everyone[0][1]
    return {**known, "state": map_state(take, params, known["state"])}


def _travels(at: Place, tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is sent in parts: it has elements and the parameter's shape."""
    shape = None if at.param is None else at.param.shape
    return tensor.shape == shape and tensor.ndim * tensor.numel() > 0


def _part(sender: Sender, full: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
    """Return this rank's part of the first rank's ``full``; ``boxes``: of each rank."""
    group, most = sender.process_group, max(box.numel for box in boxes)
    packed: dict[Box, torch.Tensor] = {}
    for box in {*boxes} if sender.mine else ():
        flat = torch.zeros(most, dtype=full.dtype, device=sender.device)
        flat[: box.numel].view(box.size).copy_(box.of(full))
        packed[box] = flat.view(torch.uint8)
    sent = [packed[box] for box in boxes] if sender.mine else None
    received = torch.empty(most * full.itemsize, dtype=torch.uint8, device=sender.device)
    _check(group, received)
    with waiting("optimizer state"):
        dist.scatter(received, sent, group=group, group_src=0)
    own = boxes[group.rank()]
    return received.view(full.dtype)[: own.numel].view(own.size)
