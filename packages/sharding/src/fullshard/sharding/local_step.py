"""Optimizers that step on local shards: the same arithmetic at the cost of plain tensors.

Owns the plain tensors that are stepped in the place of sharded parameters, and the two faces of an
optimizer's state: what the user sees stays ``DTensor``, what is stepped is the memory behind it.
It refuses optimizers whose rule it does not know to be elementwise: a norm of a whole parameter is
not that of a shard.

[Note: two faces] torch dispatches every operation on a ``DTensor`` in Python, so fused AdamW on 360
of them takes several times what it takes on plain tensors. An optimizer's ``step`` gets, in the
place of ``self``, a likeness of it, which holds plain tensors over the same memory; nothing is
copied. The likeness and its tensors are kept; before and after a step only what is another object
than at the last step is wrapped or unwrapped. Of our hooks, the one before a step runs after the
user's, the one after it before them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from operator import is_
from typing import Any, cast

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fullshard.sharding.closures import Closure, StepArguments, wrap_closure
from fullshard.sharding.compat import local_shard, make_dtensor, spec_of
from fullshard.sharding.optim_state_leaves import STEP_NUMBERS
from fullshard.sharding.optimizer_staging import is_staged, run_first
from fullshard.sharding.places import owner_of

__all__ = ["step_on_shards"]

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


class _Left:
    """A state as a step left it: as the user sees it, and as it is stepped."""

    def __init__(self, real: dict[str, Any], stepped: dict[str, Any]) -> None:
        self.stepped = stepped
        self._real_keys = tuple(real)
        self._real = tuple(real.values())
        self._stepped = tuple(stepped.values())

    def is_state(self, real: dict[str, Any]) -> bool:
        """Tells whether ``real`` is still what the user sees."""
        same = len(real) == len(self._real) > 0 and all(map(is_, real.values(), self._real))
        return same and tuple(real) == self._real_keys

    def is_stepped(self, stepped: dict[str, Any]) -> bool:
        """Tells whether ``stepped`` is still what is stepped."""
        return (
            stepped is self.stepped
            and len(stepped) == len(self._stepped)
            and all(map(is_, stepped.values(), self._stepped))
        )


class _Face:
    """One sharded parameter as a plain tensor.

    Attributes:
        local: its shard, for whose memory ``stepped`` was made.
        stepped: the plain tensor that is stepped.
        pairs: per key of the state what the user sees, and what is stepped.
        before: the state that the last step left, of which the next finds most as it is.
    """

    def __init__(self, param: nn.Parameter) -> None:
        """Makes the plain tensor over the memory of the shard."""
        self.local = local_shard(param)
        self.stepped = nn.Parameter(self.local.detach(), requires_grad=param.requires_grad)
        self.pairs: dict[str, tuple[Any, Any]] = {}
        self.before = _Left({}, {})

    def show_gradient(self, param: nn.Parameter) -> None:
        """Gives the plain tensor the local part of the gradient."""
        gradient = param.grad
        self.stepped.grad = None if gradient is None else _local_of(gradient, param)

    def to_stepped(self, param: nn.Parameter, real: dict[str, Any]) -> dict[str, Any]:
        """Returns what is stepped of ``real``."""
        if self.before.is_state(real):
            return self.before.stepped
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
        if self.before.is_stepped(stepped) and self.before.is_state(real):
            return
        for key, plain in stepped.items():
            pair = self.pairs.get(key)
            if pair is None or pair[1] is not plain:
                self.pairs[key] = pair = self._seen(key, plain, param), plain
            real[key] = pair[0]
        self.before = _Left(real, stepped)

    def _seen(self, key: str, plain: Any, param: nn.Parameter) -> Any:
        cut = isinstance(plain, torch.Tensor) and plain.shape == self.local.shape
        return make_dtensor(plain, _spec(param)) if cut and key not in STEP_NUMBERS else plain


class _Stepper:
    """What one optimizer steps on."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Registers the hooks around its steps."""
        self._faces: dict[nn.Parameter, _Face] = {}
        self._likeness: Optimizer = object.__new__(type(optimizer))
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._left: list[tuple[nn.Parameter, dict[str, Any], _Face]] = []  # see _is_as_left
        self._before = optimizer.register_step_pre_hook(_begin)
        run_first(optimizer.register_step_post_hook(_end))

    def renew(self, optimizer: Optimizer) -> None:
        """Makes the hook before a step the last one again."""
        self._before.remove()
        self._before = optimizer.register_step_pre_hook(_begin)

    def begin(self, optimizer: Optimizer) -> Optimizer:
        """Returns the likeness, up to date.

        Raises:
            _UnlikeShards: if something is cut otherwise than its parameter.
        """
        faces = self._faces = self._refreshed(optimizer)
        state = self._state
        if not self._is_as_left(optimizer):
            self._forget_state()
            for key, real in optimizer.state.items():
                param = cast(nn.Parameter, key)
                face = faces.get(param)
                if face is None:
                    state[param] = real
                else:
                    state[face.stepped] = face.to_stepped(param, real)
        attributes = vars(self._likeness)
        attributes.clear()
        attributes.update(vars(optimizer))
        attributes["state"] = state
        attributes["param_groups"] = [
            {**group, "params": [_stepped(faces, param) for param in group["params"]]}
            for group in optimizer.param_groups
        ]
        return self._likeness

    def _refreshed(self, optimizer: Optimizer) -> dict[nn.Parameter, _Face]:
        """Returns the face of each sharded parameter, with its gradient."""
        faces: dict[nn.Parameter, _Face] = {}
        for param in _params_of(optimizer):
            if not isinstance(param, DTensor):
                continue
            sharded = cast(nn.Parameter, param)
            face = self._faces.get(sharded)
            if face is None or face.local is not local_shard(sharded):
                face = _Face(sharded)
                self._left.clear()
            face.show_gradient(sharded)
            faces[sharded] = face
        return faces

    def read_gradients(self) -> None:
        """Looks at the gradients anew: a closure made them."""
        for param, face in self._faces.items():
            face.show_gradient(param)

    def end(self, optimizer: Optimizer) -> None:
        """Takes the result of a step over: groups, state and attributes."""
        likeness, state = self._likeness, self._likeness.state
        for group, stepped in zip(optimizer.param_groups, likeness.param_groups, strict=True):
            group.update({key: value for key, value in stepped.items() if key != "params"})
        same = state is self._state and self._is_stepped_as_left()
        if not (same and self._is_as_left(optimizer)):
            self._take_state(optimizer, state)
        for face in self._faces.values():
            face.stepped.grad = None
        for name, value in vars(likeness).items():
            if name not in ("param_groups", "state"):
                vars(optimizer)[name] = value
        vars(likeness).clear()

    def _take_state(self, optimizer: Optimizer, state: defaultdict[torch.Tensor, Any]) -> None:
        """Makes what was stepped the user's state, and remembers how the step left both."""
        rest = dict(state)
        for param, face in self._faces.items():
            made = rest.pop(face.stepped, None)
            if made:
                face.to_real(param, optimizer.state[param], made)
        optimizer.state.update(rest)  # of parameters that are stepped as they are
        self._forget_state()
        if rest or not all(param in self._faces for param in optimizer.state):
            return
        for key, real in optimizer.state.items():
            param = cast(nn.Parameter, key)
            face = self._faces[param]
            self._state[face.stepped] = face.before.stepped
            self._left.append((param, real, face))

    def _forget_state(self) -> None:
        self._state.clear()
        self._left.clear()

    def _is_as_left(self, optimizer: Optimizer) -> bool:
        """Tells whether the user's state is what the last step left."""
        return len(optimizer.state) == len(self._left) == len(self._state) and all(
            key is param and real is known and face.before.is_state(real)
            for (key, real), (param, known, face) in zip(
                optimizer.state.items(), self._left, strict=True
            )
        )

    def _is_stepped_as_left(self) -> bool:
        """Tells whether the state that is stepped is what the last step left."""
        return len(self._state) == len(self._left) and all(
            key is face.stepped and face.before.is_stepped(made)
            for (key, made), (_, _, face) in zip(self._state.items(), self._left, strict=True)
        )

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
        stepper.renew(optimizer)
    elif type(optimizer) in _ELEMENTWISE and any(map(_is_ours, _params_of(optimizer))):
        _steppers[optimizer] = _Stepper(optimizer)


def _params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


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
    return wrap_closure((likeness, *args[1:]), kwargs, lambda closure: _around(closure, stepper))


@torch.no_grad()
def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Takes over what the step on the likeness did."""
    stepper = _steppers[optimizer]
    if stepper.is_likeness(args[0]):
        stepper.end(optimizer)


def _around(closure: Closure, stepper: _Stepper) -> Closure:
    """Returns ``closure``, whose gradients are looked at after it."""

    def run() -> Any:
        result = closure()
        stepper.read_gradients()
        return result

    return run


def _stepped(faces: dict[Any, _Face], param: Any) -> Any:
    face = faces.get(param)
    return param if face is None else face.stepped


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
