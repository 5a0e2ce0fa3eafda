"""Shadow optimizers: an optimizer's ``step`` runs on plain shards, or where offload wants it.

Owns what ``step`` gets in the place of ``self``, from just before it to just after, and the two
forms of the optimizer's state. [Note: shadow optimizers] torch dispatches every operation on a
``DTensor`` in Python, so fused AdamW on 360 of them takes several times what it takes on plain
tensors; and an optimizer keys its state by the parameter object, whose gradient must lie where it
does. So ``step`` gets a shadow of the optimizer: the same class and attributes, but groups and
state of shadow parameters. The optimizer itself is untouched until the end, which takes over
groups, state and attributes; if ``step`` raises, nothing has to be put back.

The shadow of a parameter is a plain tensor over the memory of its shard, if the optimizer's rule is
elementwise, or a copy of the shard where its policy wants the step; or both. What the policy gives
back unmoved is not copied.

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
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from operator import is_, itemgetter
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fullshard.comm.runtime.devices import traits_of
from fullshard.sharding.base.compat import (
    gradients_of,
    local_shard,
    local_shards,
    make_dtensor,
    spec_of,
    specs_of,
)
from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.optim.rules import STEP_NUMBERS
from fullshard.sharding.params.owner import owner_of
from fullshard.sharding.params.param import FSDPParam

__all__ = ["ShadowOptimizer", "UnlikeShards", "are_same", "open_on", "params_in", "place_state"]

_params = itemgetter("params")
_SHADOW = "_fullshard_shadow"


def params_in(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the parameters in the groups of an optimizer, in order."""
    return list(chain.from_iterable(map(_params, groups)))


def are_same(found: Collection[Any], known: Collection[Any]) -> bool:
    """Tells whether they hold the same objects: ``==`` of tensors is another question."""
    return len(found) == len(known) and all(map(is_, found, known))


def _objects_in(state: Mapping[Any, Any]) -> list[Any]:
    """Returns all objects in a state, whose order tells where each is."""
    values = list(state.values())
    dicts = [each for each in values if isinstance(each, dict)]  # else what the user put there
    keys, items = chain.from_iterable(dicts), chain.from_iterable(map(dict.values, dicts))
    return [*state, *values, *map(len, dicts), *keys, *items]


# -- one parameter --------------------------------------------------------------------------------


class UnlikeShards(Exception):
    """Something is cut otherwise than its parameter, so the step needs a ``DTensor``."""


class Shadow:
    """What is stepped in the place of one sharded parameter.

    Attributes:
        local: the parameter's shard, for which it was made.
        stepped: what is stepped.
        mover: who shards the parameter, if ``stepped`` is a copy.
    """

    def __init__(
        self, param: nn.Parameter, data: torch.Tensor, mover: FSDPParam | None, *, plain: bool
    ) -> None:
        """Takes ``data``: the shard, or a copy of it where it is stepped."""
        self.mover = mover
        self.local = local_shard(param)
        self._spec = spec_of(cast(DTensor, param))
        data = data.detach() if plain else make_dtensor(data, self._spec)
        self.stepped = nn.Parameter(data, requires_grad=param.requires_grad)
        if not plain:
            self.stepped.__dict__.update(param.__dict__)  # what the user put on it

    @property
    def data(self) -> torch.Tensor:
        """What is stepped, as a plain tensor."""
        stepped: torch.Tensor = self.stepped
        return local_shard(stepped) if isinstance(stepped, DTensor) else stepped.detach()

    def local_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the local part of ``tensor``.

        Raises:
            UnlikeShards: if it is cut otherwise than the parameter.
        """
        if not isinstance(tensor, DTensor):
            raise UnlikeShards
        found, spec = spec_of(tensor), self._spec
        if found is not spec and (found.placements != spec.placements or found.mesh != spec.mesh):
            raise UnlikeShards
        return local_shard(tensor)

    def to_plain(self, real: dict[str, Any]) -> dict[str, Any]:
        """Returns the user's state with the local part of each tensor in it.

        Raises:
            UnlikeShards: if a part of it is cut otherwise than the parameter.
        """
        return {
            key: self.local_of(value) if isinstance(value, DTensor) else value
            for key, value in real.items()
        }

    def to_real(self, real: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
        """Returns the user's state ``real``, changed to what ``plain`` has become in the step."""
        for key, value in plain.items():
            known = real.get(key)
            if value is (local_shard(known) if isinstance(known, DTensor) else known):
                continue
            cut = isinstance(value, torch.Tensor) and value.shape == self.local.shape
            whole = not cut or key in STEP_NUMBERS
            real[key] = value if whole else make_dtensor(value, self._spec)
        return real


def shadow_of(param: Any, *, plain: bool) -> Shadow | None:
    """Returns a new shadow of ``param``; None if it is stepped itself."""
    if not isinstance(param, DTensor):
        return None
    owner, shard = owner_of(param), local_shard(param)
    data = shard
    if owner is not None and owner.sharded is param:
        data = moved_to_step(shard, owner)
    mover = None if data is shard else owner
    if mover is None and not plain:
        return None
    return Shadow(cast(nn.Parameter, param), data, mover, plain=plain)


def moved_to_step(tensor: torch.Tensor, owner: FSDPParam) -> torch.Tensor:
    """Returns ``tensor``, a ``DTensor`` or not, where the parameter of ``owner`` is stepped."""
    offload, device = owner.offload, owner.device
    if not isinstance(tensor, DTensor):
        return offload.stage_step(tensor, device)
    local = local_shard(tensor)
    moved = offload.stage_step(local, device)
    return tensor if moved is local else make_dtensor(moved, spec_of(tensor))


def await_copies(owners: Iterable[FSDPParam | None]) -> None:
    """Waits once per policy for what was copied to the host, which reads without a stream."""
    waits = {(id(each.offload), each.device): each for each in owners if each}
    for each in waits.values():
        each.offload.arrived(each.device)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Tells whether ``tensor`` lies where reading waits for no stream."""
    return not traits_of(tensor.device).queued


# -- an optimizer ---------------------------------------------------------------------------------


class ShadowOptimizer:
    """What is stepped in the place of one optimizer: see [Note: shadow optimizers].

    Attributes:
        copies: the parameters whose shadows are copies, which serve for one step.
    """

    def __init__(self, *, plain: bool) -> None:
        """Holds nothing yet; ``plain``: shadows are plain tensors, not ``DTensor``."""
        self.copies: dict[torch.Tensor, Shadow] = {}
        self._plain = plain
        self._given: list[Any] = []  # what they were made of
        self._types: list[type] = []  # ``swap_tensors`` changes it
        self._of: dict[Any, Shadow] = {}
        self._locals: list[torch.Tensor] = []
        self._all: list[Any] = []  # shadows, and the other parameters themselves, in order
        self._state: Any = {}
        self._seen: list[Any] = []  # what was in the user's state
        self._made: list[Any] = []  # what was in ours then, made of it
        self._is_stale = True  # ours may not be what is made of the user's

    @staticmethod
    def of(stepped: Any) -> ShadowOptimizer | None:
        """Returns the shadow optimizer that made ``stepped``, what ``step`` was called with."""
        found: ShadowOptimizer | None = vars(stepped).get(_SHADOW)
        return found

    def begin(self, optimizer: Optimizer) -> Optimizer | None:
        """Returns what is to be stepped; None if everything is stepped itself.

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
        """Makes ``stepped`` like ``optimizer``, but for the parameters."""
        groups = optimizer.param_groups
        params = params_in(groups)
        if not (
            are_same(params, self._given)
            and list(map(type, params)) == self._types
            and are_same(local_shards(self._of), self._locals)
        ):
            self._make(params)
        self._read_gradients()
        is_stale = self._is_stale or not are_same(_objects_in(optimizer.state), self._seen)
        self._is_stale = True  # until the end of the step: anything until then may raise
        if is_stale:
            self._show_state(optimizer)
        shadows, attributes = iter(self._all), vars(stepped)
        lists = {id(of): list(islice(shadows, len(of))) for of in map(_params, groups)}
        for name, value in vars(optimizer).items():
            attributes[name] = lists.get(id(value), value)  # LBFGS has the list of its group
        attributes["state"] = self._state
        attributes["param_groups"] = [{**g, "params": lists[id(g["params"])]} for g in groups]
        attributes[_SHADOW] = self

    def _make(self, params: list[Any]) -> None:
        """Makes the shadows of ``params``, which are not those of the last step."""
        self._is_stale = True
        self._given, self._types = params, list(map(type, params))
        made = {param: shadow_of(param, plain=self._plain) for param in dict.fromkeys(params)}
        self._of = {param: shadow for param, shadow in made.items() if shadow is not None}
        self._locals = [shadow.local for shadow in self._of.values()]
        self._all = [self._of[each].stepped if each in self._of else each for each in params]
        self.copies = {param: shadow for param, shadow in self._of.items() if shadow.mover}

    def _show_state(self, optimizer: Optimizer) -> None:
        """Makes the state that is stepped anew of the user's, and remembers what is in both."""
        self._state = copy.copy(optimizer.state)
        self._state.clear()
        for param, real in optimizer.state.items():
            shadow = self._of.get(param)
            key = param if shadow is None else shadow.stepped
            self._state[key] = real if shadow is None or not self._plain else shadow.to_plain(real)
        self._seen, self._made = _objects_in(optimizer.state), _objects_in(self._state)

    def _read_gradients(self) -> None:
        """Gives each shadow its part of the gradient: the memory itself, or a copy.

        Raises:
            UnlikeShards: if shadows are plain, and a gradient is cut otherwise than its parameter.
        """
        gradients = gradients_of(self._of)
        shadows = self._of.values()
        if self._plain:
            specs = specs_of(gradients), specs_of(self._of)
            for shadow, gradient, found, spec in zip(shadows, gradients, *specs, strict=True):
                if found is not spec and gradient is not None:
                    shadow.local_of(gradient)
            gradients = local_shards(gradients)
        for shadow, gradient in zip(shadows, gradients, strict=True):
            if gradient is not None and shadow.mover is not None:
                gradient = moved_to_step(gradient, shadow.mover)
            shadow.stepped.grad = gradient
        if self.copies:
            await_copies(each.mover for each in self.copies.values() if is_on_host(each.data))

    def read(self) -> None:
        """Copies the parameters and their gradients anew, to the shadows that are copies."""
        for param, shadow in self.copies.items():
            shadow.data.copy_(local_shard(param), non_blocking=True)
        self._read_gradients()

    def write_back(self) -> None:
        """Copies what was stepped to the parameters."""
        for param, shadow in self.copies.items():
            local_shard(param).copy_(shadow.data, non_blocking=True)
        await_copies(each.mover for each in self.copies.values() if is_on_host(each.local))

    def look_again(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Takes over what a closure changed.

        Raises:
            RuntimeError: if it left something cut otherwise than its parameter: the step has begun.
        """
        try:
            if self.copies:
                self.read()
            else:
                self._is_stale = False  # the step changed no state yet
                self._show(optimizer, stepped)
        except UnlikeShards:
            raise RuntimeError(
                f"the closure given to {type(optimizer).__name__}.step() left a gradient or a "
                "state that is not cut as its parameter is; redistribute it to the parameter's "
                "placements in the closure, or run the closure before step() and call that without "
                "it"
            ) from None

    def end(self, optimizer: Optimizer, stepped: Optimizer) -> None:
        """Takes the result of a step over: parameters, groups, state and attributes."""
        if self.copies:
            self.write_back()
        attributes = vars(stepped)
        del attributes[_SHADOW]
        groups, state = attributes.pop("param_groups"), attributes.pop("state")
        for group, result in zip(optimizer.param_groups, groups, strict=True):
            group.update({**result, "params": group["params"]})
        if state is not self._state or not are_same(_objects_in(state), self._made):
            self._take_state(optimizer, state)
        self._is_stale = False
        for shadow in self._of.values():
            shadow.stepped.grad = None  # keeps no gradient's memory
        lists = set(map(id, map(_params, groups)))
        for name, value in attributes.items():
            if id(value) not in lists:
                vars(optimizer)[name] = value
        with _open_lock:
            _open.discard(self)

    def _take_state(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
        """Makes what was stepped the user's state."""
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
        self._seen, self._made = _objects_in(optimizer.state), _objects_in(state)


_open: weakref.WeakSet[ShadowOptimizer] = weakref.WeakSet()  # several where optimizers are nested
_open_lock = threading.Lock()  # ranks may be threads of one process, which step at once


def open_on(params: Collection[Any]) -> list[ShadowOptimizer]:
    """Returns those of steps in progress that step copies of any of ``params``."""
    if not _open:
        return []
    with _open_lock:
        steps = tuple(_open)
    return [each for each in steps if not each.copies.keys().isdisjoint(params)]


@torch.no_grad()
def place_state(optimizer: Optimizer) -> None:
    """Brings the state to where steps are: loading put it where the parameters live."""
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
