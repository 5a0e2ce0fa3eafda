"""Puts the sharded or the unsharded parameters of a group into the modules that hold them.

Owns the swap of all parameters at once in each gather and reshard, and the guards of the modules
(see [Note: touch]). The swap reads only the place of a parameter and the parameter: following each
from object to object would cost more than all the rest, since little of it is still in a cache by
then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

from torch import nn

from fullshard.sharding.base.compat import (
    FREED,
    current_graph_task,
    set_versions,
    version_of,
)
from fullshard.sharding.params.lost_data import require_own_data
from fullshard.sharding.params.param import FSDPParam, Place
from fullshard.sharding.params.registry import Registry, registry_of
from fullshard.sharding.params.sharded_access_errors import Guard, guards_of

__all__ = ["Swap"]

_requires_grad = attrgetter("requires_grad")


class Swap:
    """The places of some parameters, as a list for either state."""

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        """Look at the parameters when they are swapped first, and when one has changed since."""
        self._params = params
        self._generation = params[0].generation
        self._sharded: list[nn.Parameter] = []
        self._unsharded: list[nn.Parameter] = []
        self.forget()
        self._guards: list[tuple[dict[str, Any], Guard]] = []  # with its module's attributes
        self._flags: list[bool] = []
        self._versions: tuple[int, ...] = ()  # of the unsharded parameters, while they are freed

    def to_unsharded(self) -> None:
        """Put the unsharded parameters into every place, and remove the guards of the modules.

        A guard takes the place of ``forward`` while parameters are sharded.
        """
        if self._replacements != self._generation.replacements:
            self._look()
        if self._versions:  # see [Note: reads]
            set_versions(tuple(self._unsharded), self._versions)
            self._versions = ()
        # no graph of backward asks for the flags: what was set since holds from the next forward on
        if current_graph_task() == -1 and list(map(_requires_grad, self._sharded)) != self._flags:
            self.sync_requires_grad()
        for place, name, unsharded in zip(self._places, self._names, self._full_at, strict=True):
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
        if self._replacements != self._generation.replacements:
            self._look()
        if freed and not self._versions:
            self._versions = tuple(map(version_of, self._unsharded))
            set_versions(tuple(self._unsharded), (FREED,) * len(self._unsharded))
        if list(map(_requires_grad, self._unsharded)) != self._flags:
            self.sync_requires_grad()
        placed = zip(self._places, self._names, self._sharded_at, self._full_at, strict=True)
        for place, name, sharded, unsharded in placed:
            if place.get(name) is unsharded:
                place[name] = sharded
        for attributes, guard in self._guards:
            attributes.setdefault("forward", guard)  # or what a user put there

    @property
    def replaced(self) -> bool:
        """Whether a place holds neither of the two: a user put something there."""
        found = list(map(self._get, self._places, self._names))
        if all(map(is_, found, self._sharded_at)):
            return False
        either = zip(found, self._sharded_at, self._full_at, strict=True)
        return not all(there is sharded or there is full for there, sharded, full in either)

    def require_tied(self) -> None:
        """Raise if a user put a tensor into some, but not all, of the places of one parameter.

        Raises:
            ValueError: names the parameter.
        """
        for param in self._params:
            held = [place.held for place in param.places]
            if any(each is not held[0] for each in held) and any(
                _is_replaced(place, param) for place in param.places
            ):
                raise ValueError(
                    f"{param.name} is tied: {len(held)} modules share it, and no longer hold the "
                    "same tensor, because an assignment replaced it in some of them; assign one "
                    "new parameter to all of them, or untie them before fully_shard"
                )

    def require_own_data(self) -> None:
        """Raise if ``data`` of a sharded parameter was set; see [Note: data]."""
        require_own_data(self._params)

    def forget(self) -> None:
        """Forget the places, which the next swap looks up; until then ``replaced`` is False."""
        self._replacements = -1
        self._places: list[Registry] = []
        self._get: Callable[[Any, str], nn.Parameter | None] = dict.get
        self._names: list[str] = []
        self._sharded_at: list[nn.Parameter] = []  # the sharded parameter of each place
        self._full_at: list[nn.Parameter] = []  # the unsharded parameter of each place

    def sync_requires_grad(self) -> None:
        """Give both of each the flag that was set on either since they last agreed."""
        for param in self._params:
            param.sync_requires_grad()
        self._flags = list(map(_requires_grad, self._sharded))

    def _look(self) -> None:
        self._replacements = self._generation.replacements
        params = self._params
        self._sharded = [param.sharded for param in params]
        before, self._unsharded = self._unsharded, [param.unsharded for param in params]
        if not (len(before) == len(self._unsharded) and all(map(is_, before, self._unsharded))):
            self._versions = ()
        places = [(place, param) for param in params for place in param.places]
        self._places = [registry_of(place.module) for place, _ in places]
        self._get = dict.get if all(isinstance(p, dict) for p in self._places) else _get
        self._names = [place.name for place, _ in places]
        self._sharded_at = [param.sharded for _, param in places]
        self._full_at = [param.unsharded for _, param in places]
        guards = guards_of(dict.fromkeys(place.module for place, _ in places))
        self._guards = [(guard.module.__dict__, guard) for guard in guards]
        self.sync_requires_grad()


def _is_replaced(place: Place, param: FSDPParam) -> bool:
    return place.held is not param.sharded and place.held is not param.unsharded


def _get(place: Registry, name: str) -> nn.Parameter | None:
    return place.get(name)
