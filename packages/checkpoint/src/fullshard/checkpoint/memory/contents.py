"""The contents of a segment: this rank's shards of a state dict, copied once.

Owns the order of a segment: tensors first, as they are in memory, then all other values in one
pickle. Names and parts are those of torch's planner for ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.stateful import Stateful

from fullshard.checkpoint.memory.segments import Entry
from fullshard.sharding.spi import is_plain, local_of

__all__ = ["Contents", "plain_state"]

_ALIGNMENT = 64


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state`` with each ``Stateful`` replaced by its state dict."""
    return {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state.items()}


class Contents:
    """The parts of a state dict that one rank saves: their sizes and places.

    Attributes:
        nbytes: of the segment.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        """Take a state dict as ``torch.distributed.checkpoint.save`` does; nothing is copied yet.

        Values that are no tensors are pickled.
        """
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(plain_state(state))
        self._places: dict[str, tuple[int, int]] = {}
        self._tensors: list[tuple[int, torch.Tensor]] = []
        self._pickles: list[tuple[int, bytes]] = []
        values: dict[str, Any] = {}
        self.nbytes = 0
        for name, value in self._planner.state_dict.items():
            if not isinstance(value, torch.Tensor):
                values[name] = value
                continue
            local = local_of(value).detach()
            if _is_raw(local):
                self._tensors.append((self._place(name, local.nbytes), local))
            else:
                pickled = pickle.dumps(local.cpu())
                self._pickles.append((self._place(name, len(pickled)), pickled))
        pickled = pickle.dumps(values)
        self._values = (self._place("", len(pickled)), len(pickled))
        self._pickles.append((self._values[0], pickled))

    def _place(self, name: str, nbytes: int) -> int:
        start = self.nbytes
        self._places[name] = (start, nbytes)
        self.nbytes = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return start

    @torch.no_grad()
    def copy_to(self, target: torch.Tensor) -> None:
        """Copy everything into ``target``, bytes; wait until a device has done so."""
        for start, local in self._tensors:
            if local.numel():
                into = target[start : start + local.nbytes].view(local.dtype).view(local.shape)
                into.copy_(local, non_blocking=True)
        for start, pickled in self._pickles:
            into = target[start : start + len(pickled)]
            into.copy_(torch.frombuffer(bytearray(pickled), dtype=torch.uint8))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._tensors.clear()
        self._pickles.clear()

    def entries(self) -> tuple[Entry, ...]:
        """Return what is where; reads shapes only, which training does not change."""
        entries = []
        for item in self._planner.create_local_plan().items:
            name = item.index.fqn
            value = self._planner.state_dict[name]
            if not isinstance(value, torch.Tensor):
                entries.append(Entry(item.index, None, torch.Size(), None, *self._values))
                continue
            data = item.tensor_data
            assert data is not None, "it is a tensor"
            local = local_of(value)
            dtype = local.dtype if _is_raw(local) else None
            if local.numel() or not value.numel():
                if dtype is None and data.chunk.sizes != local.shape:
                    raise TypeError(
                        f"{name} has parts of {type(local).__name__}, which memory checkpoints do "
                        "not cut; save it with async_save"
                    )
                place = self._places[name]
                entries.append(Entry(item.index, data.chunk, data.size, dtype, *place))
        return tuple(entries)


def _is_raw(local: torch.Tensor) -> bool:
    """Tell whether the elements of a tensor, one after the other, stand for it."""
    return is_plain(local) and local.layout is torch.strided and not local.is_quantized
