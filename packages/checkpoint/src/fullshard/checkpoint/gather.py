"""Whole tensors from the parts of an optimizer's state.

Owns the collectives: parts that are cut in plain chunks over one mesh axis travel many at once, as
bytes; to the first rank alone where only that one wants them. Other cuts (strided, or on several
axes: tensor parallelism) are brought together one tensor after the other, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.leaves import sharding_axis
from fullshard.checkpoint.pieces import Cut, batches, join, pack, unpack
from fullshard.comm import EventKind, check_collective
from fullshard.sharding.base.compat import finished, local_shard
from fullshard.sharding.mesh.mesh_info import device_of_mesh

__all__ = ["Receiver", "gather_parts"]


@dataclass(frozen=True, kw_only=True)
class Receiver:
    """Who gets whole tensors, and where.

    Attributes:
        first: the only rank that does, by its global number; None: every rank.
        to_cpu: put them on the CPU, each batch as soon as it is there.
    """

    first: int | None
    to_cpu: bool

    @property
    def mine(self) -> bool:
        """Whether this rank gets them."""
        return self.first is None or not dist.is_initialized() or self.first == dist.get_rank()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` where it was asked for."""
        tensor = tensor.detach()
        return tensor.cpu() if self.to_cpu else tensor

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of ``tensor`` where it was asked for: a step does not change it."""
        return tensor.detach().to("cpu" if self.to_cpu else tensor.device, copy=True)


def gather_parts(tensors: Sequence[DTensor], receiver: Receiver) -> list[torch.Tensor | None]:
    """Returns the whole of each of ``tensors``, or None where this rank is not to have it.

    Every rank calls it with the same tensors in the same order.
    """
    whole: list[torch.Tensor | None] = [None] * len(tensors)
    lanes: dict[dist.ProcessGroup, list[int]] = {}
    for index, tensor in enumerate(tensors):
        found = sharding_axis(tensor)
        if found is None:
            full = finished(tensor.full_tensor())
            whole[index] = receiver.place(full) if receiver.mine else None
            continue
        mesh, axis, _ = found
        if axis < 0 or mesh.size(axis) == 1:
            whole[index] = receiver.copy(local_shard(tensor)) if receiver.mine else None
        else:
            lanes.setdefault(mesh.get_group(axis), []).append(index)
    for process_group, indices in lanes.items():
        ranks = dist.get_process_group_ranks(process_group)
        if receiver.first is not None and receiver.first not in ranks:
            continue  # a replica of what the first rank's group sends, or what it does not know
        lane = _Lane(process_group, device_of_mesh(tensors[indices[0]].device_mesh), receiver)
        gathered = lane.gather([tensors[index] for index in indices])
        for index, each in zip(indices, gathered, strict=True):
            whole[index] = each
    return whole


@dataclass(frozen=True)
class _Lane:
    """One process group over which tensors are cut."""

    process_group: dist.ProcessGroup
    device: torch.device
    receiver: Receiver

    def gather(self, tensors: Sequence[DTensor]) -> list[torch.Tensor | None]:
        """Returns the whole tensors, a batch at a time."""
        cuts = [_cut_of(tensor) for tensor in tensors]
        whole: list[torch.Tensor | None] = []
        for start, end in batches(cuts):
            few = cuts[start:end]
            packed = pack([local_shard(each) for each in tensors[start:end]], few, self.device)
            received = self._exchange(packed)
            if not received:
                whole += [None] * len(few)
                continue
            columns = [unpack(each, few, [index] * len(few)) for index, each in enumerate(received)]
            for cut, parts in zip(few, zip(*columns, strict=True), strict=True):
                whole.append(self.receiver.place(join(cut, parts)))
        return whole

    def _exchange(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Returns what each rank packed; nothing on ranks that get nothing."""
        check_collective(
            EventKind.ALL_GATHER,
            "the state of an optimizer",
            self.process_group,
            nbytes=packed.nbytes,
        )
        received: list[torch.Tensor] = []
        if self.receiver.mine:
            received = [torch.empty_like(packed) for _ in range(self.process_group.size())]
        if packed.numel() == 0:
            return received
        if self.receiver.first is None:
            dist.all_gather(received, packed, group=self.process_group)
        else:
            dist.gather(packed, received or None, dst=self.receiver.first, group=self.process_group)
        return received


def _cut_of(tensor: DTensor) -> Cut:
    found = sharding_axis(tensor)
    assert found is not None
    mesh, axis, dim = found
    return Cut(torch.Size(tensor.shape), tensor.dtype, dim, mesh.size(axis))
