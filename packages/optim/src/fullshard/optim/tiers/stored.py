"""The state of an optimizer in a tier: which tensors are there, and how they get there.

``StoredState`` is the main class; see [Note: state in a tier] in ``offloaded``. The class keeps the
first error until all ranks can raise it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.optim.tiers.staged import Entry, Item, is_dense, laid_as
from fullshard.optim.tiers.staging import Batch
from fullshard.optim.tiers.state_file import Extent
from fullshard.optim.tiers.tier import FileTier, HostTier
from fullshard.sharding.spi import PLAIN, local_of, make_dtensor, spec_of

__all__ = ["StoredState"]


class StoredState:
    """The state of one optimizer, whose large tensors are in a tier.

    Attributes:
        space: the memory of the tier: a file, or host memory.
        staging: the buffers through which the state travels.
        error: the first error since ``take_error``; empty if there is none.
    """

    def __init__(self, optimizer: Optimizer, tier: FileTier | HostTier) -> None:
        """Make the memory of the tier.

        Raises:
            OSError: if that is not possible.
        """
        self._optimizer = optimizer
        self._min_bytes = tier.min_bytes
        self._advice = tier.advice
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.space, self.staging = tier.open([local_of(param) for param in params])
        self.error = ""
        self._entries: dict[int, Entry] = {}  # by the id of the tensor in the state

    def take_error(self) -> str:
        """Return the first error, and forget it."""
        error, self.error = self.error, ""
        return error

    def note(self, what: str, advice: str) -> None:
        """Keep an error, unless there is one."""
        self.error = self.error or f"{what}; {advice}"

    def read(self, params: Iterable[torch.Tensor]) -> tuple[list[Item], Batch]:
        """Begin to read the state of parameters."""
        params = list(params)
        self.staging.settle([item.entry.extent for item in self._items_of(params)])
        items = self._items_of(params)  # a write that failed has moved state to memory
        extents = [item.entry.extent for item in items]
        return items, self.staging.read(extents, partial(self._rescue, items))

    def _items_of(self, params: Iterable[torch.Tensor]) -> list[Item]:
        items = []
        for param in params:
            state: dict[Any, Any] = self._optimizer.state.get(param) or {}
            for key, value in state.items():
                entry = self.entry_of(value)
                if entry is not None:
                    items.append(Item(param, key, state, entry))
        return items

    def entry_of(self, value: Any) -> Entry | None:
        """Return the place of a tensor of the state; None if the tensor has memory of its own."""
        entry = self._entries.get(id(value))
        if entry is None or entry.tensor is not value:
            return None
        start = self._memory_of(entry.extent)
        same = local_of(value).data_ptr() == start.data_ptr()
        return entry if same else None  # else a user gave it other memory

    def store_all(self, params: Iterable[torch.Tensor]) -> None:
        """Move the state of parameters from memory to the tier."""
        states = [(param, self._optimizer.state.get(param)) for param in params]
        self.store([(p, key) for p, state in states if isinstance(state, dict) for key in state])

    def store(self, found: Sequence[tuple[Any, Any]], *, after: Batch | None = None) -> None:
        """Move tensors of the state, by parameter and key, from memory to the tier.

        ``after``: a batch to write before them.
        """
        items, sources = [], []
        if after is not None:
            self.staging.write(after)
        for param, key in found:
            state = self._optimizer.state[param]
            value = state[key]
            if self.entry_of(value) is not None or not self._may_move(value):
                continue
            try:
                extent = self.space.reserve(local_of(value).nbytes)
            except OSError as error:
                what = f"no space for {local_of(value).nbytes} bytes of {key!r}: {error.strerror}"
                self.note(what, self._advice)
                continue
            items.append(Item(param, key, state, self._new_entry(extent, value)))
            sources.append(local_of(value))
        if not items:
            return
        extents = [item.entry.extent for item in items]
        batch = self.staging.take(extents, partial(self._rescue, items))
        for item, view, source in zip(items, batch.views, sources, strict=True):
            item.entry.within(view).copy_(source)
            item.state[item.key] = item.entry.tensor
            self._entries[id(item.entry.tensor)] = item.entry
        self.staging.write(batch)

    def _new_entry(self, extent: Extent, value: torch.Tensor) -> Entry:
        local = local_of(value)
        with torch.inference_mode(False):
            tensor = laid_as(local, self._memory_of(extent))
            if isinstance(value, DTensor):
                tensor = make_dtensor(tensor, spec_of(value))
        return Entry(extent, tensor, local.device)

    def _memory_of(self, extent: Extent) -> torch.Tensor:
        return self.space.view(extent.offset, extent.nbytes)

    def _may_move(self, value: Any) -> bool:
        """Return whether a value of the state is a tensor that the tier can hold."""
        if not isinstance(value, torch.Tensor):
            return False
        if type(value) not in PLAIN and not isinstance(value, DTensor):
            return False
        local = local_of(value)
        return local.nbytes >= self._min_bytes and is_dense(local) and self.space.takes(local)

    def _rescue(self, items: Sequence[Item], batch: Batch, error: OSError) -> None:
        """Keep a bucket's state in memory, after a write of it failed."""
        for item, view in zip(items, batch.views, strict=True):
            entry, local = item.entry, item.entry.within(view).clone().to(item.entry.device)
            if item.state.get(item.key) is entry.tensor:
                spec = entry.spec
                item.state[item.key] = local if spec is None else make_dtensor(local, spec)
        nbytes = sum(view.numel() for view in batch.views)
        self.note(
            f"{nbytes} bytes could not be written: {error.strerror}",
            "the state stays in memory; save a checkpoint, then use another folder",
        )

    def forget_unused(self) -> None:
        """Free the space of tensors that are no longer in the state."""
        states = [each for each in self._optimizer.state.values() if isinstance(each, dict)]
        used = {id(value) for state in states for value in state.values()}
        for key in self._entries.keys() - used:
            self.space.give_back(self._entries.pop(key).extent)
