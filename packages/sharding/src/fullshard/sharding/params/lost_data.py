"""Notices ``tensor.data = new`` on sharded parameters and gradients, where torch loses ``new``.

``DataWatch`` notices it on a parameter, ``NotedStorage`` on a gradient. The groups and the hooks of
optimizers raise the errors of this module at the next use.

[Note: data] ``tensor.data = new`` gives a ``DTensor`` the metadata and the storage of ``new``, and
leaves it its local shard: the new values are lost, and torch raises no error. Code that was written
for plain parameters does this: it swaps in averages of weights for an evaluation and restores the
weights afterwards, or divides ``param.grad.data`` by a loss scale. A subclass of ``DTensor`` could
not help: see [Note: touch]. But each ``DTensor`` has a storage of its own, without memory, and the
assignment frees this storage. A weak reference to the storage of a sharded parameter calls back
then, and costs nothing before. A gradient is new in each step: its
storage is noted when the gradient is made, and compared before the optimizer's step. References to
the tensors themselves would not do, as ``torch.utils.swap_tensors`` refuses tensors that have any.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import nn

from fullshard.sharding.base.compat import gradients_of
from fullshard.sharding.base.forward_pass import ParameterGeneration
from fullshard.sharding.base.memory import storage_object

__all__ = ["DataWatch", "NotedStorage", "require_own_data", "require_own_gradients"]

_NOTE = "noted_storage"


class Watched(Protocol):
    """A parameter that can be watched: an ``FSDPParam``."""

    name: str
    sharded: nn.Parameter
    generation: ParameterGeneration
    data_watch: DataWatch

    def restore_data(self) -> None:
        """Give the sharded parameter the metadata of its shard again."""


class DataWatch:
    """Notices ``param.data = new`` on one sharded parameter; see [Note: data].

    Attributes:
        was_set: whether that happened.
    """

    def __init__(self, owner: Watched) -> None:
        """Watch the present ``owner.sharded``."""
        self.was_set = False
        self._owner = weakref.ref(owner)
        self._attributes = owner.sharded.__dict__
        storage = storage_object(owner.sharded)
        freed = partial(_freed, weakref.ref(self))
        self._storage = None if storage is None else weakref.ref(storage, freed)

    def freed(self) -> None:
        """Note that the storage of the parameter was freed."""
        owner = self._owner()
        if owner is None or owner.data_watch is not self:
            return
        if owner.sharded.__dict__ is self._attributes:  # else swap_tensors took both
            self.was_set = owner.generation.data_was_set = True
            owner.generation.replacements += 1


def _freed(watch: weakref.ref[DataWatch], storage: object) -> None:
    found = watch()
    if found is not None:
        found.freed()


def require_own_data(params: Iterable[Watched]) -> None:
    """Raise if ``data`` of any of ``params`` was set, and give these their metadata again.

    Raises:
        RuntimeError: if it was.
    """
    found = [param for param in params if param.data_watch.was_set]
    for param in found:
        param.generation.data_was_set = False
        param.restore_data()
    if found:
        names = [f"{param.name}.data" for param in found]
        raise RuntimeError(_text(names, "param.copy_(new)"))


class NotedStorage(tuple[torch.UntypedStorage]):
    """The storage with which a gradient was made. Copies and pickles as an empty mapping.

    The gradient has the note as its attribute ``noted_storage``.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave the storage out: it has no memory, and a copy of the gradient has another."""
        return OrderedDict, ()


def require_own_gradients(params: Sequence[nn.Parameter], owners: Sequence[Watched]) -> None:
    """Raise if ``data`` of a gradient of ``params`` was set.

    Args:
        params: sharded parameters.
        owners: the owner of each.

    Raises:
        RuntimeError: if it was.
    """
    gradients: list[Any] = gradients_of(params)
    notes = map(getattr, gradients, repeat(_NOTE), repeat(None))
    found = [
        f"{owner.name}.grad.data"
        for owner, gradient, note in zip(owners, gradients, notes, strict=True)
        if note and note[0] is not gradient.untyped_storage()
    ]
    if found:
        raise RuntimeError(_text(found, "param.grad.copy_(new)"))


def _text(names: Sequence[str], copy: str) -> str:
    return (
        f"{', '.join(names)} was set, but a DTensor keeps its local shard, so the new values would "
        f"be lost; copy them in place, as `with torch.no_grad(): {copy}`"
    )
