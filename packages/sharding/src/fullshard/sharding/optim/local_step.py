"""Optimizers that step on local shards: the same arithmetic at the cost of plain tensors.

Owns the plain tensors that are stepped in the place of sharded parameters, and the two faces of an
optimizer's state: what the user sees stays ``DTensor``, what is stepped is the memory behind it.
It refuses optimizers whose rule it does not know to be elementwise: a norm of a whole parameter is
not that of a shard.

[Note: two faces] torch dispatches every operation on a ``DTensor`` in Python, so fused AdamW on 360
of them takes several times what it takes on plain tensors. An optimizer's ``step`` gets, in the
place of ``self``, a likeness of it, which holds plain tensors over the same memory; nothing is
copied. The likeness and its tensors are kept, and so is the state that it steps, until the user or
a step puts another object into either. Finding that out must cost less than it saves, so flat lists
are compared: what is to be avoided is a call in Python per parameter. Of our hooks, the one before
a step runs after the user's, the one after it before them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice
from operator import is_
from typing import Any, cast

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fullshard.sharding.base.closures import Closure, StepArguments, wrap_closure
from fullshard.sharding.base.compat import (
    gradients_of,
    local_shard,
    local_shards,
    make_dtensor,
    spec_of,
    specs_of,
)
from fullshard.sharding.optim.optimizer_staging import is_staged, run_first
from fullshard.sharding.optim.whole_parameters import needs_whole_parameters, require_whole
from fullshard.sharding.params.owner import owner_of

__all__ = ["STEP_NUMBERS", "step_on_shards"]

STEP_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""State that torch's optimizers keep as one number per parameter, whatever its shape."""

# Exactly these, whose rules are elementwise: a subclass may do anything.
_ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)


class _UnlikeShards(Exception):
    """Something is cut otherwise than its parameter; the step runs on the ``DTensor``."""


class _Face:
    """One sharded parameter as a plain tensor.

    Attributes:
        local: its shard, for whose memory ``stepped`` was made.
        stepped: the plain tensor that is stepped.
        pairs: per key of the state what the user sees, and what is stepped.
    """

    def __init__(self, param: nn.Parameter) -> None:
        """Makes the plain tensor over the memory of the shard."""
        self.local = local_shard(param)
        self.stepped = nn.Parameter(self.local.detach(), requires_grad=param.requires_grad)
        self.pairs: dict[str, tuple[Any, Any]] = {}

    def to_stepped(self, param: nn.Parameter, real: dict[str, Any]) -> dict[str, Any]:
        """Returns what is stepped of ``real``."""
        stepped = {}
        for key, value in real.items():
            pair = self.pairs.get(key)
            if pair is None or pair[0] is not value:
                plain = _local_of(value, param) if isinstance(value, DTensor) else value
                self.pairs[key] = pair = value, plain
            stepped[key] = pair[1]
        return stepped

    def to_real(self, param: nn.Parameter, real: dict[str, Any], stepped: dict[str, Any]) -> None:
        """Makes ``real`` what the user sees of ``stepped``."""
        for key, plain in stepped.items():
            pair = self.pairs.get(key)
            if pair is None or pair[1] is not plain:
                self.pairs[key] = pair = self._seen(key, plain, param), plain
            real[key] = pair[0]

    def _seen(self, key: str, plain: Any, param: nn.Parameter) -> Any:
        cut = isinstance(plain, torch.Tensor) and plain.shape == self.local.shape
        return make_dtensor(plain, _spec(param)) if cut and key not in STEP_NUMBERS else plain


class _Faces:
    """The parameters of an optimizer as what is stepped in their place.

    Attributes:
        of: the face of each sharded parameter.
        stepped: what is stepped, in the order of the groups: plain tensors, and the other
            parameters themselves.
    """

    def __init__(self, params: list[Any], known: dict[nn.Parameter, _Face]) -> None:
        """Takes from ``known`` the faces of parameters that lie where they lay."""
        self.of: dict[nn.Parameter, _Face] = {}
        for param in dict.fromkeys(params):
            if isinstance(param, DTensor):
                sharded = cast(nn.Parameter, param)
                face = known.get(sharded)
                same = face is not None and face.local is local_shard(sharded)
                self.of[sharded] = cast(_Face, face) if same else _Face(sharded)
        self.stepped = [self.of[each].stepped if each in self.of else each for each in params]
        self._params = params
        self._types = list(map(type, params))  # ``swap_tensors`` changes it
        self._sharded = list(self.of)
        self._locals = [face.local for face in self.of.values()]
        self._plain = [face.stepped for face in self.of.values()]

    def are_of(self, params: list[Any]) -> bool:
        """Tells whether they were made of ``params``, which lie where they lay."""
        return (
            _are_same(params, self._params)
            and list(map(type, params)) == self._types
            and _are_same(local_shards(self._sharded), self._locals)
        )

    def show_gradients(self) -> None:
        """Gives each plain tensor the local part of the gradient.

        Raises:
            _UnlikeShards: if a gradient is cut otherwise than its parameter.
        """
        gradients = gradients_of(self._sharded)
        specs = specs_of(gradients), specs_of(self._sharded)
        for param, gradient, found, spec in zip(self._sharded, gradients, *specs, strict=True):
            if found is not spec and gradient is not None:
                _local_of(gradient, param)
        for stepped, local in zip(self._plain, local_shards(gradients), strict=True):
            stepped.grad = local

    def drop_gradients(self) -> None:
        """Keeps no gradient's memory."""
        for stepped in self._plain:
            stepped.grad = None


class _Contents:
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
            _are_same(state, self._params)
            and _are_same(state.values(), self._values)
            and list(map(len, self._dicts)) == self._lengths
            and list(chain.from_iterable(self._dicts)) == self._keys
            and all(map(is_, _items_of(self._dicts), self._items))
        )


def _items_of(dicts: list[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


class _Stepper:
    """What one optimizer steps on: see [Note: two faces]."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Registers the hooks around its steps."""
        self._faces = _Faces([], {})
        self._likeness: Optimizer = object.__new__(type(optimizer))
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._seen = self._stepped = _Contents({})  # of the user's state and of ours, made of it
        self._is_stale = True  # ours may not be what is made of the user's
        self._before = optimizer.register_step_pre_hook(_begin)
        run_first(optimizer.register_step_post_hook(_end))

    def run_last(self) -> None:
        """Makes the hook before a step the last one again."""
        hooks = self._before.hooks_dict_ref()
        assert hooks is not None, "the optimizer is alive"
        hooks.move_to_end(self._before.id)

    def begin(self, optimizer: Optimizer) -> Optimizer:
        """Returns the likeness, up to date.

        Raises:
            _UnlikeShards: if something is cut otherwise than its parameter.
        """
        params = _params_of(optimizer)
        if not self._faces.are_of(params):
            self._faces = _Faces(params, self._faces.of)
            self._is_stale = True
        self._faces.show_gradients()
        if self._is_stale or not self._seen.are_of(optimizer.state):
            self._show_state(optimizer)
        self._is_stale = True  # until the end of the step, which may raise
        stepped = iter(self._faces.stepped)
        attributes = vars(self._likeness)
        attributes.clear()
        attributes.update(vars(optimizer))
        attributes["state"] = self._state
        attributes["param_groups"] = [
            {**group, "params": list(islice(stepped, len(group["params"])))}
            for group in optimizer.param_groups
        ]
        return self._likeness

    def _show_state(self, optimizer: Optimizer) -> None:
        """Makes the state that is stepped anew of the user's, and remembers what is in both."""
        self._state.clear()
        for param, real in optimizer.state.items():
            face = self._faces.of.get(cast(nn.Parameter, param))
            if face is None:
                self._state[param] = real
            else:
                self._state[face.stepped] = face.to_stepped(cast(nn.Parameter, param), real)
        self._seen, self._stepped = _Contents(optimizer.state), _Contents(self._state)

    def begin_again(self, optimizer: Optimizer) -> None:
        """Looks at everything anew: a closure ran, before the step changed any state."""
        self._is_stale = False
        self.begin(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """Takes the result of a step over: groups, state and attributes."""
        likeness, state = self._likeness, self._likeness.state
        for group, stepped in zip(optimizer.param_groups, likeness.param_groups, strict=True):
            group.update({key: value for key, value in stepped.items() if key != "params"})
        self._is_stale = state is not self._state or not self._stepped.are_of(state)
        if self._is_stale:
            self._take_state(optimizer, state)
        self._faces.drop_gradients()
        for name, value in vars(likeness).items():
            if name not in ("param_groups", "state"):
                vars(optimizer)[name] = value
        vars(likeness).clear()

    def _take_state(self, optimizer: Optimizer, state: defaultdict[torch.Tensor, Any]) -> None:
        """Makes what was stepped the user's state."""
        rest = dict(state)
        for param, face in self._faces.of.items():
            made = rest.pop(face.stepped, None)
            if made:
                face.to_real(param, optimizer.state[param], made)
        optimizer.state.update(rest)  # of parameters that are stepped as they are

    def is_likeness(self, other: object) -> bool:
        """Tells whether ``other`` is what it hands to a step."""
        return other is self._likeness


_steppers: weakref.WeakKeyDictionary[Optimizer, _Stepper] = weakref.WeakKeyDictionary()
_registered: list[RemovableHandle] = []


def step_on_shards() -> None:
    """Makes torch's elementwise optimizers step on shards as plain tensors, in this process.

    Call it after registering hooks that change which parameters an optimizer holds or where they
    are stepped.
    """
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_on_step))


def _on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Finds out whether ``optimizer`` can step on shards, before its own hooks run."""
    stepper = _steppers.get(optimizer)
    if stepper is not None:
        stepper.run_last()
        return
    kind = type(optimizer)
    whole = needs_whole_parameters(kind)
    if (whole or kind in _ELEMENTWISE) and any(map(_is_ours, _params_of(optimizer))):
        if whole:
            require_whole(_params_of(optimizer), kind)
        _steppers[optimizer] = _Stepper(optimizer)


def _params_of(optimizer: Optimizer) -> list[Any]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def _is_ours(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and owner_of(param) is not None


@torch.no_grad()
def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepArguments | None:
    """Makes ``step`` run on the likeness."""
    stepper = _steppers[optimizer]
    if args[0] is not optimizer or is_staged(optimizer) or torch.compiler.is_compiling():
        return None
    try:
        likeness = stepper.begin(optimizer)
    except _UnlikeShards:
        return None

    def around(closure: Closure) -> Closure:
        return lambda: _computed(closure, stepper, optimizer)

    return wrap_closure((likeness, *args[1:]), kwargs, around)


@torch.no_grad()
def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Takes over what the step on the likeness did."""
    stepper = _steppers[optimizer]
    if stepper.is_likeness(args[0]):
        stepper.end(optimizer)


def _computed(closure: Closure, stepper: _Stepper, optimizer: Optimizer) -> Any:
    """Runs ``closure``, after which everything is looked at again.

    Raises:
        RuntimeError: if it left something cut otherwise than its parameter: the step has begun.
    """
    result = closure()
    try:
        with torch.no_grad():
            stepper.begin_again(optimizer)
    except _UnlikeShards:
        raise RuntimeError(
            f"the closure given to {type(optimizer).__name__}.step() left a gradient or a state "
            "that is not cut as its parameter is; redistribute it to the parameter's placements "
            "in the closure, or run the closure before step() and call that without it"
        ) from None
    return result


def _are_same(found: Collection[Any], known: Collection[Any]) -> bool:
    """Tells whether they hold the same objects: ``==`` of tensors is another question."""
    return len(found) == len(known) and all(map(is_, found, known))


def _local_of(tensor: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """Returns the local part of ``tensor``, which must be cut as ``param`` is."""
    spec = _spec(param)
    if not isinstance(tensor, DTensor):
        raise _UnlikeShards
    found = spec_of(tensor)
    if found is not spec and (found.placements != spec.placements or found.mesh != spec.mesh):
        raise _UnlikeShards
    return local_shard(tensor)


def _spec(param: nn.Parameter) -> Any:
    assert isinstance(param, DTensor)
    return spec_of(param)
