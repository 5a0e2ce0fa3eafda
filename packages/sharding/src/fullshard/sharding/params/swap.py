"""Puts the sharded or the unsharded parameters of a group into the modules that hold them.

Owns the swap of all of them at once, which each gather and each reshard does, and with it the
guards of the modules (see [Note: touch]). It looks at nothing but where a parameter goes and the
parameter: following each from object to object would cost more than all the rest, since little of
it is still in a cache by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from fullshard.sharding.base.compat import (
    FREED,
    current_graph_task,
    set_versions,
    storage_of,
    version_of,
)
from fullshard.sharding.params.param import FSDPParam
from fullshard.sharding.params.touch import Guard, guards_of

__all__ = ["Swap"]

_Place = tuple[int, int, int]
_requires_grad = attrgetter("requires_grad")


class Swap:
    """The places of some parameters, as a list for either state."""

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        """Looks at the parameters when they are swapped first, and when one has changed since."""
        self._params = params
        self._sharded: list[nn.Parameter] = []
        self._unsharded: list[nn.Parameter] = []
        self.forget()
        self._guards: list[tuple[dict[str, Any], Guard]] = []  # beside its module's attributes
        self._flags: list[bool] = []
        self._noted: list[tuple[int, _Place]] | None = None
        self._versions: tuple[int, ...] = ()  # of the unsharded parameters, while they are freed

    def to_unsharded(self) -> None:
        """Puts the unsharded parameters into every place, and opens the guards of the modules."""
        if self._changes != FSDPParam.changes:
            self._look()
        if self._versions:  # see [Note: reads]
            set_versions(tuple(self._unsharded), self._versions)
            self._versions = ()
        # no graph of backward asks for the flags: what was set since holds from the next forward on
        if current_graph_task() == -1 and list(map(_requires_grad, self._sharded)) != self._flags:
            self.sync_requires_grad()
        for place, name, unsharded in zip(self._places, self._names, self._full, strict=True):
            place[name] = unsharded
        for attributes, guard in self._guards:
            if attributes.get("forward") is guard:
                del attributes["forward"]

    def to_sharded(self, *, freed: bool = False) -> None:
        """Put the sharded parameters into every place that holds an unsharded one.

        Other tensors that a user put there stay, and are seen before the next gather. Shuts the
        guards of the modules.

        Args:
            freed: no backward may read the unsharded parameters; see [Note: reads].
        """
        self._noted = None
        if self._changes != FSDPParam.changes:
            self._look()
        if freed and not self._versions:
            self._versions = tuple(map(version_of, self._unsharded))
            set_versions(tuple(self._unsharded), (FREED,) * len(self._unsharded))
        if list(map(_requires_grad, self._unsharded)) != self._flags:
            self.sync_requires_grad()
        placed = zip(self._places, self._names, self._own, self._full, strict=True)
        for place, name, sharded, unsharded in placed:
            if place.get(name) is unsharded:
                place[name] = sharded
        for attributes, guard in self._guards:
            attributes.setdefault("forward", guard)  # or what a user put there

    @property
    def replaced(self) -> bool:
        """Whether a place holds neither of the two: a user put something there."""
        found = list(map(dict.get, self._places, self._names))
        if all(map(is_, found, self._own)):
            return False
        either = zip(found, self._own, self._full, strict=True)
        return not all(there is sharded or there is full for there, sharded, full in either)

    def forget(self) -> None:
        """Knows no place until the next swap: modules may hold copies, which replace nothing."""
        self._changes = -1
        self._places: list[dict[str, nn.Parameter | None]] = []
        self._names: list[str] = []
        self._own: list[nn.Parameter] = []  # by place: the sharded one, then the unsharded one
        self._full: list[nn.Parameter] = []

    def note(self) -> None:
        """Remembers the unsharded parameters as they are now, while nobody is to write to them."""
        self._noted = self._marks()

    def changed(self) -> list[str]:
        """Returns which of them were written to or moved since ``note()``, which it forgets.

        But for those that are the shards themselves.
        """
        noted, self._noted = self._noted, None
        if noted is None or (marks := self._marks()) == noted:
            return []
        return [
            param.name
            for param, before, after in zip(self._params, noted, marks, strict=True)
            if before != after and _place_of(param.unsharded) != _place_of(param.shard)
        ]

    def _marks(self) -> list[tuple[int, _Place]]:
        return [(version_of(param), _place_of(param)) for param in self._unsharded]

    def sync_requires_grad(self) -> None:
        """Gives both of each the flag that was set on either since they last agreed."""
        for param in self._params:
            param.sync_requires_grad()
        self._flags = list(map(_requires_grad, self._sharded))

    def _look(self) -> None:
        self._changes = FSDPParam.changes
        params = self._params
        self._sharded = [param.sharded for param in params]
        before, self._unsharded = self._unsharded, [param.unsharded for param in params]
        if not (len(before) == len(self._unsharded) and all(map(is_, before, self._unsharded))):
            self._versions = ()
        places = [(place, param) for param in params for place in param.places]
        self._places = [place.module._parameters for place, _ in places]
        self._names = [place.name for place, _ in places]
        self._own = [param.sharded for _, param in places]
        self._full = [param.unsharded for _, param in places]
        guards = guards_of(dict.fromkeys(place.module for place, _ in places))
        self._guards = [(guard.module.__dict__, guard) for guard in guards]
        self.sync_requires_grad()


def _place_of(tensor: torch.Tensor) -> _Place:
    """Returns in which storage ``tensor`` lies, and its bytes there: the first, and how many."""
    return storage_of(tensor), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes
