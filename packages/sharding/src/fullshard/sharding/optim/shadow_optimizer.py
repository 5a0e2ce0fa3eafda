"""Shadow optimizers: an optimizer's ``step`` runs on plain shards, or where offload wants it.

Owns what ``step`` gets in the place of ``self``, from just before it to just after, and the two
forms of the optimizer's state. [Note: shadow optimizers] torch dispatches every operation on a
``DTensor`` in Python, so fused AdamW on 360 of them takes several times what it takes on plain
tensors; and an optimizer keys its state by the parameter object, whose gradient must lie where it
does. So ``step`` gets a shadow of the optimizer: the same class and attributes, but groups and
state of shadow parameters. The optimizer itself is untouched until the end, which takes over
groups, state and attributes; if ``step`` raises, nothing has to be put back.

Shadows over the shards' own memory are kept, and so is the state that is stepped, until the user or
a step puts another object into either. Finding that out must cost less than it saves, so flat lists
are compared: what is to be avoided is a call in Python per parameter. Shadows that are copies live
for one step; only what ``step`` is called with keeps them alive. Their state is made where they are
and stays there. A closure computes on the parameters themselves, so copies are written back before
it and read again after it. The same happens to those of a wrapping optimizer while the one inside
it steps.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.optim.closures import Closure, StepArguments, wrap_closure
from fullshard.sharding.optim.shadow import (
    Shadows,
    UnlikeShards,
    are_same,
    await_copies,
    moved_to_step,
)
from fullshard.sharding.params.owner import Owner, owner_of

__all__ = ["ShadowOptimizer", "open_on", "own_params_of", "place_state"]


def own_params_of(optimizer: Optimizer) -> list[Any]:
    """Returns the parameters in the optimizer's groups, in order.

    None of one that only wraps another: its groups are a property, and the other has hooks as well.
    """
    return list(
        chain.from_iterable(group["params"] for group in vars(optimizer).get("param_groups", ()))
    )


class _Objects:
    """Which objects were in a state, in which order."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        """Looks at a state: per parameter a dict, or whatever the user put there."""
        self._params = list(state)
        self._values = list(state.values())
        self._dicts = [each for each in self._values if isinstance(each, dict)]
        self._lengths = list(map(len, self._dicts))
        self._keys = list(chain.from_iterable(self._dicts))
        self._items = list(_items_of(self._dicts))

    def are_of(self, state: Mapping[Any, Any]) -> bool:
        """Tells whether ``state`` has the same objects in the same places."""
        return (
            are_same(state, self._params)
            and are_same(state.values(), self._values)
            and list(map(len, self._dicts)) == self._lengths
            and list(chain.from_iterable(self._dicts)) == self._keys
            and all(map(is_, _items_of(self._dicts), self._items))
        )


def _items_of(dicts: list[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


_NO_SHADOWS = Shadows([], {}, plain=False)


class ShadowOptimizer:
    """What is stepped in the place of one optimizer: see [Note: shadow optimizers]."""

    def __init__(self, *, plain: bool) -> None:
        """Holds nothing yet; ``plain``: shadows are plain tensors, not ``DTensor``."""
        self._plain = plain
        self._shadows = _NO_SHADOWS
        self._state: Any = {}
        self._seen = self._stepped = _Objects({})  # of the user's state and of ours, made of it
        self._is_stale = True  # ours may not be what is made of the user's

    @property
    def has_copies(self) -> bool:
        """Whether any shadow is a copy: it serves for one step."""
        return bool(self._shadows.movers)

    def begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        """Returns what ``step`` is to be called with; None if everything is stepped itself.

        Raises:
            UnlikeShards: if shadows are plain, and something is cut otherwise than its parameter.
        """
        shadow: Optimizer = object.__new__(type(optimizer))  # not ours to keep alive
        self._show(optimizer, shadow)
        if not self._shadows.of:
            return None
        if self.has_copies:
            _open.append(weakref.ref(self._shadows))

        def around(closure: Closure) -> Closure:
            return lambda: self._computed(closure, optimizer, shadow)

        return wrap_closure((shadow, *args[1:]), kwargs, around)

    def _show(self, optimizer: Optimizer, shadow: Optimizer) -> None:
        """Makes ``shadow`` like ``optimizer``, but for what is stepped."""
        params = own_params_of(optimizer)
        if not self._shadows.are_of(params):
            self._shadows = Shadows(params, self._shadows.of, plain=self._plain)
            self._is_stale = True
        self._shadows.read_gradients()
        is_stale = self._is_stale or not self._seen.are_of(optimizer.state)
        self._is_stale = True  # until the end of the step: anything until then may raise
        if is_stale:
            self._show_state(optimizer)
        stepped = iter(self._shadows.stepped)
        groups = optimizer.param_groups
        lists = {id(each["params"]): list(islice(stepped, len(each["params"]))) for each in groups}
        attributes = vars(shadow)
        # an attribute may be the list of a group, as LBFGS has it
        attributes.update((name, lists.get(id(at), at)) for name, at in vars(optimizer).items())
        attributes["state"] = self._state
        attributes["param_groups"] = [
            {**each, "params": lists[id(each["params"])]} for each in groups
        ]
        attributes[_SHADOW] = self

    def _show_state(self, optimizer: Optimizer) -> None:
        """Makes the state that is stepped anew of the user's, and remembers what is in both."""
        self._state = copy.copy(optimizer.state)
        self._state.clear()
        for param, real in optimizer.state.items():
            shadow = self._shadows.of.get(param)
            if shadow is None:
                self._state[param] = real
            else:
                self._state[shadow.stepped] = shadow.to_stepped(real)
        self._seen, self._stepped = _Objects(optimizer.state), _Objects(self._state)

    def _computed(self, closure: Closure, optimizer: Optimizer, shadow: Optimizer) -> Any:
        """Runs ``closure`` on the parameters, and looks at what it changed.

        Raises:
            RuntimeError: if it left something cut otherwise than its parameter: the step has begun.
        """
        with torch.no_grad():
            self._shadows.write_back()
        result = closure()
        with torch.no_grad():
            self._look_again(optimizer, shadow)
        return result

    def _look_again(self, optimizer: Optimizer, shadow: Optimizer) -> None:
        try:
            if self.has_copies:
                self._shadows.read()
            else:
                self._is_stale = False  # the step changed no state yet
                self._show(optimizer, shadow)
        except UnlikeShards:
            raise RuntimeError(
                f"the closure given to {type(optimizer).__name__}.step() left a gradient or a "
                "state that is not cut as its parameter is; redistribute it to the parameter's "
                "placements in the closure, or run the closure before step() and call that without "
                "it"
            ) from None

    def end(self, optimizer: Optimizer, shadow: Optimizer) -> None:
        """Takes the result of a step over: parameters, groups, state and attributes."""
        self._shadows.write_back()
        attributes = vars(shadow)
        del attributes[_SHADOW]
        groups, state = attributes.pop("param_groups"), attributes.pop("state")
        for group, stepped in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in stepped.items() if key != "params"})
        self._is_stale = state is not self._state or not self._stepped.are_of(state)
        if self._is_stale:
            self._take_state(optimizer, state)
        self._shadows.drop_gradients()
        lists = [each["params"] for each in groups]
        for name, value in attributes.items():
            if not any(value is each for each in lists):
                vars(optimizer)[name] = value
        _open[:] = [each for each in _open if each() not in (None, self._shadows)]

    def _take_state(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
        """Makes what was stepped the user's state."""
        real = dict(optimizer.state)
        params = {shadow.stepped: param for param, shadow in self._shadows.of.items()}
        optimizer.state.clear()
        for key, stepped in state.items():
            param = params.get(key)
            if param is None:
                optimizer.state[key] = stepped
            elif stepped or param in real:
                shadow = self._shadows.of[param]
                optimizer.state[param] = shadow.to_real(real.get(param, {}), stepped)

    @staticmethod
    def of(stepped: Any) -> ShadowOptimizer | None:
        """Returns the shadow optimizer that made ``stepped``, what ``step`` was called with."""
        found: ShadowOptimizer | None = vars(stepped).get(_SHADOW)
        return found


_SHADOW = "_fullshard_shadow"
_open: list[weakref.ref[Shadows]] = []  # outermost first; several where optimizers are nested


def open_on(params: Iterable[Any]) -> list[Shadows]:
    """Returns the shadows of steps in progress that are copies of any of ``params``."""
    found = [shadows for each in _open if (shadows := each()) is not None]
    if not found:
        return []
    mine = set(params)
    return [each for each in found if not mine.isdisjoint(each.movers)]


@torch.no_grad()
def place_state(optimizer: Optimizer) -> None:
    """Brings the state to where steps are: loading put it where the parameters live."""
    movers: list[Owner] = []
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for param in group["params"]:
            owner = owner_of(param)
            state = optimizer.state.get(param)
            if owner is None or not state:
                continue
            movers.append(owner)
            for key, value in state.items():
                if key != "step" or on_device:  # else torch keeps it on the CPU
                    state[key] = map_tensors(lambda t: moved_to_step(t, owner), value)  # noqa: B023  # called at once
    await_copies(movers)
