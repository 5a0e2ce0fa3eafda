"""Optimizer steps that run elsewhere than where the sharded parameters live.

Owns the stand-ins that are stepped in the place of parameters, from an optimizer's step pre-hook to
its post-hook, and where the optimizer's state is after it was loaded. It refuses to know where
anything lives: the staging policy of each parameter moves, and what it gives back unmoved is
stepped as it is.

[Note: a step on stand-ins]
torch keeps a gradient on its parameter's device, and an optimizer keys its state by the parameter
object. So for a step elsewhere the optimizer's ``step`` gets, in the place of ``self``, a likeness
of the optimizer: the same class and attributes, but groups and state of stand-ins that were copied
there with their gradients. The optimizer itself is untouched until the post-hook, which copies the
parameters back and takes over groups, state and attributes; if ``step`` raises, the post-hook does
not run and nothing has to be put back. The state is made at the stand-ins' place and stays there
between steps. Of our hooks, the one before a step runs after the user's, the one after it before
them: what they do to parameters and gradients counts, and what they see is stepped.

A closure computes on the parameters themselves, so they are copied back before it and read again
after it. The same happens to the stand-ins of a wrapping optimizer while the one inside it steps.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fullshard.sharding.base.closures import Closure, StepArguments, wrap_closure
from fullshard.sharding.base.compat import local_shard, make_dtensor, spec_of
from fullshard.sharding.base.tensors import map_tensors
from fullshard.sharding.params.owner import Owner, owner_of
from fullshard.sharding.protocols import Staging

__all__ = ["is_staged", "run_first", "stage_optimizers"]

_STEP = "_fullshard_step"


class _StandIn:
    """What is stepped in the place of one parameter.

    Attributes:
        param: the parameter.
        stepped: its stand-in.
        staging: who moves.
        device: where the model computes.
        generation: that of the parameter's group.
    """

    def __init__(self, param: nn.Parameter, owner: Owner, moved: torch.Tensor) -> None:
        """Takes ``moved``, a copy of the parameter's shard, and copies the gradient."""
        self.param = param
        self.staging: Staging = owner.param.staging
        self.device: torch.device = owner.group.device
        self.generation = owner.group.generation
        self.stepped = nn.Parameter(
            make_dtensor(moved, spec_of(cast(DTensor, param))), requires_grad=param.requires_grad
        )
        self.stepped.__dict__.update(param.__dict__)  # what the user put on it
        self._read_gradient()

    def read(self) -> None:
        """Copies the parameter and its gradient anew."""
        _copy(local_shard(self.stepped), local_shard(self.param))
        self._read_gradient()

    def _read_gradient(self) -> None:
        gradient = self.param.grad
        self.stepped.grad = (
            None if gradient is None else _moved(gradient, self.staging, self.device)
        )

    def write_back(self) -> None:
        """Copies what was stepped to the parameter."""
        _copy(local_shard(self.param), local_shard(self.stepped))


class _Step:
    """One step in progress. Only the likeness that is stepped, and its closure, keep it alive."""

    def __init__(self, stand_ins: dict[nn.Parameter, _StandIn]) -> None:
        """Waits until the stand-ins have arrived."""
        self.stand_ins = stand_ins
        self._arrived(stand_in.stepped for stand_in in stand_ins.values())

    def read(self) -> None:
        """Makes the stand-ins equal to the parameters and their gradients."""
        for stand_in in self.stand_ins.values():
            stand_in.read()
        self._arrived(stand_in.stepped for stand_in in self.stand_ins.values())

    def write_back(self) -> None:
        """Makes the parameters equal to the stand-ins."""
        for stand_in in self.stand_ins.values():
            stand_in.write_back()
        self._arrived(self.stand_ins)
        for generation in {each.generation for each in self.stand_ins.values()}:
            generation.stepped()

    def _arrived(self, targets: Iterable[nn.Parameter]) -> None:
        """Waits once per policy for what was copied to the host, which reads without a stream."""
        waits = {
            (id(stand_in.staging), stand_in.device): stand_in
            for stand_in, target in zip(self.stand_ins.values(), targets, strict=True)
            if local_shard(target).device.type == "cpu"
        }
        for stand_in in waits.values():
            stand_in.staging.arrived(stand_in.device)

    def around(self, closure: Closure) -> Closure:
        """Returns ``closure``, which sees the parameters, and whose gradients are read after it."""

        def run() -> Any:
            self.write_back()
            try:
                return closure()
            finally:
                self.read()

        return run


class _Watch:
    """The hooks of one optimizer that steps elsewhere."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Registers them, and brings the state that is there already to where steps are."""
        self._before = optimizer.register_step_pre_hook(_begin)
        run_first(optimizer.register_step_post_hook(_end))
        optimizer.register_load_state_dict_post_hook(_place_state)
        _place_state(optimizer)

    def renew(self, optimizer: Optimizer) -> None:
        """Makes the hook before a step the last one again."""
        self._before.remove()
        self._before = optimizer.register_step_pre_hook(_begin)


_watched: weakref.WeakKeyDictionary[Optimizer, _Watch] = weakref.WeakKeyDictionary()
_open: list[weakref.ref[_Step]] = []  # outermost first; more than one where optimizers are nested
_registered: list[RemovableHandle] = []


def stage_optimizers() -> None:
    """Makes every optimizer of this process step where its parameters' policies say, from now on.

    Call it after registering hooks that change which parameters an optimizer holds.
    """
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_on_step))


def is_staged(optimizer: Optimizer) -> bool:
    """Tells whether ``optimizer`` was found to step elsewhere."""
    return optimizer in _watched


def _on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Finds out whether ``optimizer`` steps elsewhere, before its own hooks run."""
    watch = _watched.get(optimizer)
    if watch is not None:
        watch.renew(optimizer)
    elif any(_moved_shard(param) is not None for param in _params_of(optimizer)):
        _watched[optimizer] = _Watch(optimizer)


def _params_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    # one that only wraps another has its groups as a property, and the other one has hooks as well
    for group in vars(optimizer).get("param_groups", ()):
        yield from group["params"]


def _moved_shard(param: nn.Parameter) -> tuple[Owner, torch.Tensor] | None:
    """Returns who shards ``param`` and a copy of its shard, if it is not to be stepped itself."""
    owner = owner_of(param)
    if owner is None or owner.param.sharded is not param:
        return None
    shard = owner.param.shard
    moved = owner.param.staging.stage_step(shard, owner.group.device)
    return None if moved is shard else (owner, moved)


# -- the hooks of one optimizer -------------------------------------------------------------------


@torch.no_grad()
def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepArguments | None:
    """Makes ``step`` run on a likeness of the optimizer that holds stand-ins."""
    params = list(dict.fromkeys(_params_of(optimizer)))
    for outer in _open_on(params):
        outer.write_back()
    found = {param: moved for param in params if (moved := _moved_shard(param)) is not None}
    if not found:
        return None
    step = _Step({param: _StandIn(param, *moved) for param, moved in found.items()})
    _open.append(weakref.ref(step))
    likeness = _likeness(optimizer, step)
    return wrap_closure((likeness, *args[1:]), kwargs, step.around)


@torch.no_grad()
def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Takes the result of the step over into the parameters and the optimizer."""
    likeness = args[0]
    step: _Step | None = vars(likeness).pop(_STEP, None)
    if step is not None:
        step.write_back()
        _take_over(optimizer, likeness, step)
        _open[:] = [each for each in _open if each() not in (None, step)]
    for outer in _open_on(_params_of(optimizer)):
        outer.read()


def _open_on(params: Iterable[nn.Parameter]) -> list[_Step]:
    """Returns the steps in progress that have a stand-in for any of ``params``."""
    steps = [step for each in _open if (step := each()) is not None]
    if not steps:
        return []
    mine = set(params)
    return [step for step in steps if not mine.isdisjoint(step.stand_ins)]


def _likeness(optimizer: Optimizer, step: _Step) -> Optimizer:
    """Returns an optimizer like ``optimizer`` that holds stand-ins.

    The likeness's inner states are the optimizer's own, so a step changes them in place.
    """
    stepped = {param: stand_in.stepped for param, stand_in in step.stand_ins.items()}
    lists = {
        id(group["params"]): [stepped.get(param, param) for param in group["params"]]
        for group in optimizer.param_groups
    }
    state = copy.copy(optimizer.state)
    state.clear()
    state.update({_mapped(stepped, key): value for key, value in optimizer.state.items()})
    likeness = object.__new__(type(optimizer))
    # an attribute may be the list of a group, as LBFGS has it
    vars(likeness).update(
        {name: lists.get(id(value), value) for name, value in vars(optimizer).items()}
    )
    likeness.param_groups = [
        {**group, "params": lists[id(group["params"])]} for group in optimizer.param_groups
    ]
    likeness.state = state
    vars(likeness)[_STEP] = step
    return likeness


def _take_over(optimizer: Optimizer, likeness: Optimizer, step: _Step) -> None:
    """Makes groups, state and attributes of ``optimizer`` what the step made of the likeness's."""
    originals = {stand_in.stepped: param for param, stand_in in step.stand_ins.items()}
    lists = [each["params"] for each in likeness.param_groups]
    for group, stepped in zip(optimizer.param_groups, likeness.param_groups, strict=True):
        group.update({key: value for key, value in stepped.items() if key != "params"})
    state = {_mapped(originals, key): value for key, value in likeness.state.items()}
    optimizer.state.clear()
    optimizer.state.update(state)
    for name, value in vars(likeness).items():
        if name not in ("param_groups", "state") and not any(value is each for each in lists):
            vars(optimizer)[name] = value


def _mapped(table: dict[nn.Parameter, nn.Parameter], key: Any) -> Any:
    return table.get(key, key) if isinstance(key, nn.Parameter) else key


# -- state that came from a checkpoint ------------------------------------------------------------


@torch.no_grad()
def _place_state(optimizer: Optimizer) -> None:
    """Brings the state to where steps are: loading put it where the parameters live."""
    waits: dict[tuple[int, torch.device], Staging] = {}
    for group in optimizer.param_groups:
        on_device = bool(group.get("capturable") or group.get("fused"))
        for param in group["params"]:
            owner = owner_of(param)
            state = optimizer.state.get(param)
            if owner is None or not state:
                continue
            staging, device = owner.param.staging, owner.group.device
            waits[id(staging), device] = staging
            for key, value in state.items():
                if key != "step" or on_device:  # else torch keeps it on the CPU
                    state[key] = map_tensors(lambda t: _moved(t, staging, device), value)  # noqa: B023  # called at once
    for (_, device), staging in waits.items():
        staging.arrived(device)


def _moved(tensor: torch.Tensor, staging: Staging, device: torch.device) -> torch.Tensor:
    """Returns ``tensor``, a DTensor or not, where the optimizer steps."""
    if not isinstance(tensor, DTensor):
        return staging.stage_step(tensor, device)
    local = local_shard(tensor)
    moved = staging.stage_step(local, device)
    return tensor if moved is local else make_dtensor(moved, spec_of(tensor))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def run_first(handle: RemovableHandle) -> None:
    """Makes the hook of ``handle`` the first of those registered beside it."""
    hooks = handle.hooks_dict_ref()
    assert hooks is not None, "the optimizer is alive"
    hooks.move_to_end(handle.id, last=False)
