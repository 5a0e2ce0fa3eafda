"""Shadow optimizers: an optimizer's ``step`` runs on plain shards, or where offload wants it.

Owns what ``step`` gets in the place of ``self``, from just before it to just after, and the two
forms of the optimizer's state. [Note: shadow optimizers] torch dispatches every operation on a
``DTensor`` in Python, so fused AdamW on 360 parameters takes several times longer than on plain
tensors; and an optimizer keys its state by the parameter object, whose gradient must be on the
parameter's device. Therefore ``step`` gets a shadow of the optimizer: the same class and
attributes, but groups and state of shadow parameters. The optimizer itself is untouched until the
end, which takes over groups, state and attributes; if ``step`` raises, nothing has to be put back.

The shadow of a parameter is a plain tensor over the memory of its shard, if the optimizer's rule is
elementwise, or a copy of the shard where its policy wants the step; or both. Tensors that the
policy returns unmoved are not copied.

Shadows over the shards' own memory are kept, with the state that is stepped, until the user or a
step replaces an object in either. Finding that out must cost less than it saves, so flat lists are
compared: what is to be avoided is a call in Python per parameter. A step that raises leaves its
changes in this state for the next step, as in a plain optimizer. Shadows that are copies live for
one step; only what ``step`` is called with keeps them alive. Their state is made where they are and
stays there. A closure computes on the parameters themselves, so copies are written back before it
and read again after it. A wrapping optimizer's copies are treated likewise while the optimizer
inside steps.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Collection, Mapping
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.optim.steps.gradient_stores import GradientStore, gradient_stores_of
from fullshard.optim.steps.shadow import (
    Shadow,
    UnlikeShards,
    await_copies,
    is_on_host,
    moved_to_step,
    shadow_of,
)
from fullshard.sharding import map_tensors
from fullshard.sharding.spi import (
    addresses_of,
    are_same,
    gradients_of,
    local_of,
    local_shard,
    local_shards,
    owner_of,
    params_in,
    specs_of,
    storage_object,
)

__all__ = ["ShadowOptimizer", "open_on", "place_state"]

_params = itemgetter("params")
_SHADOW = "_fullshard_shadow"


def _objects_in(state: Mapping[Any, Any]) -> list[Any]:
    """Return all objects in a state, in an order that shows the position of each."""
    values = list(state.values())
    dicts = [each for each in values if isinstance(each, dict)]  # else what the user put there
    keys, items = chain.from_iterable(dicts), chain.from_iterable(map(dict.values, dicts))
    return [*state, *values, *map(len, dicts), *keys, *items]


class _Contents:
    """The objects in a state at one time, and this rank's part of each ``DTensor`` among them.

    A ``DTensor`` can get another part and stay the same object: ``torch.utils.swap_tensors`` and
    an assignment to ``_local_tensor`` do that. An assignment to ``data`` leaves the part, so that
    the new values are lost; see [Note: data].

    Attributes:
        freed: references to storages of a ``DTensor`` that were freed since.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        """Note what is in ``state`` now."""
        self._objects = _objects_in(state)
        found = islice(self._objects, len(state), None)  # without the parameters
        self._cut = [each for each in found if isinstance(each, DTensor)]
        self._parts = local_shards(self._cut)
        self.freed: list[weakref.ref[torch.UntypedStorage]] = []
        self._storages = [
            None if storage is None else weakref.ref(storage, self.freed.append)
            for storage in map(storage_object, self._cut)
        ]

    def require_own_data(self, optimizer: Optimizer) -> None:
        """Raise if ``data`` of a ``DTensor`` was set; for use after a storage was freed.

        Raises:
            RuntimeError: if it was.
        """
        held = set(map(id, _objects_in(optimizer.state)))
        for each, part, storage in zip(self._cut, self._parts, self._storages, strict=True):
            lost = storage is not None and storage() is None and local_shard(each) is part
            if lost and id(each) in held:
                raise RuntimeError(
                    f"data of a state of {type(optimizer).__name__} was set, but a DTensor keeps "
                    "its local shard, so the new values would be lost; copy them in place"
                )

    def are_in(self, state: Mapping[Any, Any]) -> bool:
        """Return whether ``state`` holds identical objects, with identical parts."""
        same = are_same(_objects_in(state), self._objects)
        return same and are_same(local_shards(self._cut), self._parts)


class ShadowOptimizer:
    """The optimizer that is stepped instead of another: see [Note: shadow optimizers].

    Attributes:
        copies: the parameters whose shadows are copies, which live for one step.
    """

    def __init__(self, *, plain: bool) -> None:
        """Hold nothing yet; ``plain``: shadows are plain tensors, not ``DTensor``."""
        self.copies: dict[torch.Tensor, Shadow] = {}
        self._plain = plain
        self._given: list[Any] = []  # what they were made of
        self._types: list[type] = []  # ``swap_tensors`` changes it
        self._of: dict[Any, Shadow] = {}
        self._locals: list[torch.Tensor] = []
        self._addresses: list[int] = []  # of those
        self._stores: dict[int, GradientStore] = {}  # by place
        self._all: list[Any] = []  # shadows, and the other parameters themselves, in order
        self._state: Any = {}
        self._seen = _Contents({})  # what was in the user's state
        self._made = _Contents({})  # the objects then made for our state
        self._is_stale = True  # ours was not made for the present shadows
        self._options: list[dict[str, Any]] = []  # of the user's groups, when a closure began

    @staticmethod
    def of(stepped: Any) -> ShadowOptimizer | None:
        """Return the shadow optimizer that made ``stepped``, what ``step`` was called with."""
        found: ShadowOptimizer | None = vars(stepped).get(_SHADOW)
        return found

    def begin(self, optimizer: Optimizer) -> Optimizer | None:
        """Return an optimizer of plain shards or copies; None if ``optimizer`` itself can step.

        Raises:
            UnlikeShards: if shadows are plain, and something is cut otherwise than its parameter.
        """
        stepped: Optimizer = object.__new__(type(optimizer))  # not ours to keep alive
        self._show(optimizer, stepped)
        if not self._of:
            return None
        if self.copies:
            with _open_lock:
                _open.add(self)
        return stepped

    def _show(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Make ``stepped`` like ``optimizer``, but for the parameters."""
        groups = optimizer.param_groups
        params = params_in(groups)
        if not (
            are_same(params, self._given)
            and list(map(type, params)) == self._types
            and are_same(local_shards(self._of), self._locals)
            and addresses_of(self._locals) == self._addresses
        ):
            self._make(params)
        self._read_gradients()
        if self._seen.freed:
            self._seen.require_own_data(optimizer)
        if self._is_stale or not self._seen.are_in(optimizer.state):
            self._show_state(optimizer)
        shadows, attributes = iter(self._all), vars(stepped)
        lists = {id(of): list(islice(shadows, len(of))) for of in map(_params, groups)}
        for name, value in vars(optimizer).items():
            attributes[name] = lists.get(id(value), value)  # LBFGS has the list of its group
        attributes["state"] = self._state
        attributes["param_groups"] = [{**g, "params": lists[id(g["params"])]} for g in groups]
        attributes[_SHADOW] = self

    def _make(self, params: list[Any]) -> None:
        """Make the shadows of ``params``, which are not those of the last step."""
        self._is_stale = True
        self._given, self._types = params, list(map(type, params))
        made = {param: shadow_of(param, plain=self._plain) for param in dict.fromkeys(params)}
        self._of = {param: shadow for param, shadow in made.items() if shadow is not None}
        self._locals = [shadow.local for shadow in self._of.values()]
        self._addresses = addresses_of(self._locals)
        self._all = [self._of[each].stepped if each in self._of else each for each in params]
        self.copies = {param: shadow for param, shadow in self._of.items() if shadow.mover}
        self._stores = gradient_stores_of(self._of)

    def _show_state(self, optimizer: Optimizer) -> None:
        """Make the stepped state from the user's state again, and remember the objects of both."""
        shown = copy.copy(optimizer.state)
        shown.clear()
        for param, real in optimizer.state.items():
            shadow = self._of.get(param)
            key = param if shadow is None else shadow.stepped
            shown[key] = real if shadow is None or not self._plain else shadow.to_plain(real)
        self._state, self._is_stale = shown, False
        self._seen, self._made = _Contents(optimizer.state), _Contents(self._state)

    def _read_gradients(self) -> None:
        """Give each shadow its part of the gradient: the memory itself, or a copy.

        Raises:
            UnlikeShards: if shadows are plain, and a gradient is cut otherwise than its parameter.
        """
        gradients = gradients_of(self._of)
        shadows = self._of.values()
        if self._plain:
            if not are_same(specs_of(gradients), specs_of(self._of)):
                for shadow, gradient in zip(shadows, gradients, strict=True):
                    if gradient is not None:
                        shadow.part_of(gradient)
            gradients = local_shards(gradients)
        for at, store in self._stores.items():
            if (gradient := gradients[at]) is not None:
                store.read_in(local_of(gradient))
        if self.copies:
            gradients = [
                gradient
                if gradient is None or shadow.mover is None
                else moved_to_step(gradient, shadow.mover)
                for shadow, gradient in zip(shadows, gradients, strict=True)
            ]
        for shadow, gradient in zip(shadows, gradients, strict=True):
            shadow.stepped.grad = gradient
        if self.copies:
            await_copies(each.mover for each in self.copies.values() if is_on_host(each.data))

    def read(self) -> None:
        """Copy the parameters and their gradients again, to the shadows that are copies."""
        self._read_params()
        self._read_gradients()

    def _read_params(self) -> None:
        for param, shadow in self.copies.items():
            shadow.data.copy_(local_shard(param), non_blocking=True)

    def write_back(self) -> None:
        """Copy what was stepped to the parameters."""
        for param, shadow in self.copies.items():
            local_shard(param).copy_(shadow.data, non_blocking=True)
        await_copies(each.mover for each in self.copies.values() if is_on_host(each.local))

    def before_closure(self, optimizer: Optimizer) -> None:
        """Bring the parameters up to date for a closure, and notes the options of the groups."""
        self.write_back()
        self._options = [dict(group) for group in optimizer.param_groups]

    def after_closure(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Take over what a closure changed: parameters, gradients, options and state.

        Raises:
            RuntimeError: if it left something cut otherwise than its parameter: the step has begun.
        """
        try:
            self._read_params()
            if self._plain:
                self._show(optimizer, stepped)
            else:
                self._read_gradients()
                self._take_options(optimizer, stepped)
        except UnlikeShards:
            raise RuntimeError(
                f"the closure given to {type(optimizer).__name__}.step() left a gradient or a "
                "state that is not cut as its parameter is; redistribute it to the parameter's "
                "placements in the closure, or run the closure before step() and call that without "
                "it"
            ) from None

    def _take_options(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Give the groups that are stepped the options that a closure changed.

        Others stay: the step may have changed them, and the user's groups do not show it yet.
        """
        pairs = zip(optimizer.param_groups, self._options, strict=True)
        for (group, before), ours in zip(pairs, stepped.param_groups, strict=True):
            changed = {name for name in group if group[name] is not before.get(name, self)}
            ours.update({name: group[name] for name in changed - {"params"}})

    def end(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Take the result of a step over: parameters, groups, state and attributes."""
        if self.copies:
            self.write_back()
        attributes = vars(stepped)
        del attributes[_SHADOW]
        groups, state = attributes.pop("param_groups"), attributes.pop("state")
        for group, result in zip(optimizer.param_groups, groups, strict=True):
            group.update({**result, "params": group["params"]})
        if state is not self._state or not self._made.are_in(state):
            self._take_state(optimizer, state)
        for shadow in self._of.values():
            shadow.stepped.grad = None  # keeps no gradient's memory
        lists = set(map(id, map(_params, groups)))
        for name, value in attributes.items():
            if id(value) not in lists:
                vars(optimizer)[name] = value
        with _open_lock:
            _open.discard(self)

    def _take_state(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
        """Make what was stepped the user's state."""
        real = dict(optimizer.state)
        params = {shadow.stepped: param for param, shadow in self._of.items()}
        optimizer.state.clear()
        for key, value in state.items():
            param = params.get(key)
            if param is None or not self._plain:
                optimizer.state[key if param is None else param] = value
            elif value or param in real:
                optimizer.state[param] = self._of[param].to_real(real.get(param, {}), value)
        self._state = state
        self._seen, self._made = _Contents(optimizer.state), _Contents(state)


_open: weakref.WeakSet[ShadowOptimizer] = weakref.WeakSet()  # several where optimizers are nested
_open_lock = threading.Lock()  # ranks may be threads of one process, which step at once


def open_on(params: Collection[Any]) -> list[ShadowOptimizer]:
    """Return those of steps in progress that step copies of any of ``params``."""
    if not _open:
        return []
    with _open_lock:
        steps = tuple(_open)
    return [each for each in steps if not each.copies.keys().isdisjoint(params)]


@torch.no_grad()
def place_state(optimizer: Optimizer) -> None:
    """Bring the state to where steps are: loading put it where the parameters live."""
    movers = []
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
