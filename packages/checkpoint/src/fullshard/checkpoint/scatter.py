"""Parts of an optimizer's state from the one rank that has all of it.

Owns the collectives: what is small goes to every rank as it is, of the tensors each rank receives
what it keeps, many at once as bytes. It refuses to read a state dict on other ranks than the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.leaves import as_cut, sharding_axis
from fullshard.checkpoint.pieces import Cut, batches, pack, unpack
from fullshard.comm import EventKind, check_collective
from fullshard.sharding.base.compat import ShardedTensor
from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.hooks.agreement import RankMismatchError

__all__ = ["Sender", "scatter_state"]


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

    def tell(self, value: Any) -> Any:
        """Returns the first rank's ``value`` on every rank."""
        told = [value if self.mine else None]
        dist.broadcast_object_list(told, src=self.first, group=self.process_group)
        return told[0]


@dataclass(frozen=True)
class _Travels:
    """Stands for a tensor that travels in parts.

    Attributes:
        name: of its parameter.
        shape: of the whole tensor.
        dtype: of its elements.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype


def scatter_state(
    named: Mapping[str, Any] | None,
    error: Exception | None,
    params: Mapping[str, torch.Tensor],
    sender: Sender,
) -> dict[str, Any]:
    """Returns the first rank's state dict, of which this rank has its own parts.

    Args:
        named: with first clean names as keys and whole tensors; None on other ranks than the first.
        error: what the first rank found wrong.
        params: the model's parameters by name.
        sender: who sends to whom.

    Raises:
        RankMismatchError: on all ranks but the first, if that one has an error.
        Exception: on the first rank, ``error``.
    """
    tensors: list[torch.Tensor] = []
    skeleton: Any = None
    slots: list[_Travels] = []
    if named is not None and error is None:
        try:
            skeleton = {**named, "state": _skeleton(named["state"], params, tensors, slots)}
        except ValueError as found:
            error = found
    text = "" if error is None else f"{type(error).__name__}: {error}"
    text, skeleton, slots = sender.tell((text, skeleton, slots))
    if error is not None:
        raise error
    if text:
        raise RankMismatchError(f"rank {sender.first} cannot scatter the optimizer's state: {text}")
    received = _receive(slots, tensors, params, sender)
    skeleton["state"] = {k: _filled(v, received) for k, v in skeleton["state"].items()}
    told: dict[str, Any] = skeleton
    return told


def _skeleton(
    state: Mapping[Any, Any],
    params: Mapping[str, torch.Tensor],
    tensors: list[torch.Tensor],
    slots: list[_Travels],
) -> dict[Any, Any]:
    """Returns ``state`` with the number of its slot in the place of each tensor that travels.

    Numbers are 0-d tensors on the meta device, so that they may stand where a tensor does.
    """
    skeleton = {}
    for name, value in state.items():
        items = value.items() if isinstance(value, dict) else [("", value)]
        made = {}
        for key, item in items:

            def leave(tensor: torch.Tensor, name: Any = name, key: str = str(key)) -> torch.Tensor:
                param = params.get(name)
                if isinstance(tensor, (DTensor, ShardedTensor)):
                    raise ValueError(
                        f"the state of {name} holds a {type(tensor).__name__}, {key}; scatter a "
                        "full state dict, or load shards on every rank"
                    )
                if param is None or tensor.ndim == 0 or tensor.shape != param.shape:
                    return tensor.detach().cpu()
                slots.append(_Travels(name, torch.Size(tensor.shape), tensor.dtype))
                tensors.append(tensor.detach())
                return torch.empty((len(slots),), device="meta")

            made[key] = map_tensors(leave, item)
        skeleton[name] = made if isinstance(value, dict) else made[""]
    return skeleton


def _filled(value: Any, received: Sequence[torch.Tensor]) -> Any:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        return received[tensor.numel() - 1] if tensor.device.type == "meta" else tensor

    return map_tensors(fill, value)


def _receive(
    slots: Sequence[_Travels],
    tensors: Sequence[torch.Tensor],
    params: Mapping[str, torch.Tensor],
    sender: Sender,
) -> list[torch.Tensor]:
    """Returns what this rank keeps of each of ``tensors``, which the first rank alone has."""
    cuts = [_cut_of(slot, params[slot.name]) for slot in slots]
    mine = [_index_of(params[slot.name]) for slot in slots]
    everyones: list[list[int]] = [[] for _ in range(sender.process_group.size())]
    dist.gather_object(
        mine, everyones if sender.mine else None, dst=sender.first, group=sender.process_group
    )
    found: list[torch.Tensor] = []
    for start, end in batches(cuts):
        few, names = cuts[start:end], [slot.name for slot in slots[start:end]]
        sent = None
        if sender.mine:
            sent = [
                pack(
                    [
                        cut.part_of(tensor, index)
                        for cut, tensor, index in zip(
                            few, tensors[start:end], theirs[start:end], strict=True
                        )
                    ],
                    few,
                    sender.device,
                )
                for theirs in everyones
            ]
        packed = _scatter(sent, sum(cut.slot for cut in few), sender)
        parts = unpack(packed, few, mine[start:end])
        for cut, name, part in zip(few, names, parts, strict=True):
            kept = part.clone()  # a view would keep the whole batch alive
            found.append(as_cut(params[name], kept) if cut.parts > 1 else kept)
    return found


def _scatter(sent: list[torch.Tensor] | None, nbytes: int, sender: Sender) -> torch.Tensor:
    check_collective(
        EventKind.ALL_GATHER, "the state of an optimizer", sender.process_group, nbytes=nbytes
    )
    packed = torch.empty(nbytes, dtype=torch.uint8, device=sender.device)
    if nbytes > 0:
        dist.scatter(packed, sent, src=sender.first, group=sender.process_group)
    return packed


def _cut_of(slot: _Travels, param: torch.Tensor) -> Cut:
    """Returns how the tensor travels: in parts where ranks keep plain chunks, else whole."""
    if isinstance(param, DTensor):
        found = sharding_axis(param)
        if found is not None and found[1] >= 0:
            return Cut(slot.shape, slot.dtype, found[2], found[0].size(found[1]))
    return Cut(slot.shape, slot.dtype, 0, 1)


def _index_of(param: torch.Tensor) -> int:
    """Returns which part this rank keeps; another rank's mesh may be another slice of all ranks."""
    found = sharding_axis(param) if isinstance(param, DTensor) else None
    if found is None or found[1] < 0:
        return 0
    return found[0].get_local_rank(found[1])
