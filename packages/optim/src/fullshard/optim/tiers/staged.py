"""Tensors of optimizer state: their places in the tier, and their form during a step.

``Entry`` is the place of a tensor, ``Item`` its owner; ``Staged`` is the state of a bucket during a
step. ``stored`` decides which tensors the tier holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.comm.spi import traits_of
from fullshard.optim.tiers.staging import Batch
from fullshard.optim.tiers.state_file import Extent
from fullshard.sharding.spi import ShardingSpec, local_of, make_dtensor, spec_of

__all__ = ["Entry", "Item", "Staged", "is_dense", "laid_as"]


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of state that is in a tier.

    Attributes:
        extent: the place of the tensor.
        tensor: the view of the mapped file, or of host memory, that the optimizer's state holds.
        device: the device on which the optimizer steps the tensor.
    """

    extent: Extent
    tensor: torch.Tensor
    device: torch.device

    @property
    def spec(self) -> ShardingSpec | None:
        """The placements of the tensor; None: a plain tensor."""
        return spec_of(self.tensor) if isinstance(self.tensor, DTensor) else None

    def within(self, view: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the tensor in ``view``, the bytes of an extent."""
        return laid_as(local_of(self.tensor), view)


@dataclass(frozen=True, eq=False)
class Item:
    """One tensor of the state of a parameter, and its place in the tier.

    Attributes:
        param: the parameter.
        key: the name of the tensor in its state.
        state: the state of the parameter in the wrapped optimizer.
        entry: the place of the tensor.
    """

    param: Any
    key: Any
    state: dict[Any, Any]
    entry: Entry


class Staged:
    """The state of a bucket during a step: views of its buffer, or copies on another device."""

    def __init__(self, items: Sequence[Item], batch: Batch) -> None:
        """Make the tensors; a copy to a device may be on its way on the current stream."""
        self.batch = batch
        self._of: dict[tuple[Any, Any], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for item, view in zip(items, batch.views, strict=True):
            entry = item.entry
            staged = entry.within(view)
            local = staged if view.device == entry.device else _copied(staged, entry.device)
            value = local if entry.spec is None else make_dtensor(local, entry.spec)
            self._of[item.param, item.key] = value, local, staged

    def value(self, param: Any, key: Any, otherwise: Any) -> Any:
        """Return the staged tensor of ``key``; ``otherwise`` if none is staged."""
        found = self._of.get((param, key))
        return otherwise if found is None else found[0]

    def keeps(self, param: Any, key: Any, value: Any) -> bool:
        """Return whether the state still holds the staged tensor after a step."""
        found = self._of.get((param, key))
        return found is not None and found[0] is value and local_of(value) is found[1]

    def collect(self) -> None:
        """Copy state that was stepped on a device to the buffer, and wait for the copies."""
        devices = set()
        for _, local, staged in self._of.values():
            if local is not staged:
                staged.copy_(local, non_blocking=True)
                devices.add(local.device)
        for device in devices:
            if traits_of(device).streams:
                torch.accelerator.current_stream(device).synchronize()
            else:
                torch.get_device_module(device).synchronize()


def laid_as(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor like ``tensor`` in ``memory``, which has at least as many bytes."""
    flat = memory[: tensor.nbytes].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def _copied(staged: torch.Tensor, device: torch.device) -> torch.Tensor:
    copy = torch.empty_strided(staged.shape, staged.stride(), dtype=staged.dtype, device=device)
    return copy.copy_(staged, non_blocking=True)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return tensor.layout is torch.strided
