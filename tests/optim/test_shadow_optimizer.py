"""torch's elementwise optimizers step on plain shards: bit for bit the same, and nobody sees it.

Right is what the same optimizer does to the same sharded model on ``DTensor``, as a subclass of it
does: only the exact classes are known to be elementwise.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fullshard.optim import clip_grad_norm_
from fullshard.sharding import fully_shard, replicate
from support.modules import Assembled
from support.parity.compare import EXACT, Tolerance, assert_equal, parameters_of, rounding
from support.products import few
from support.ranks import cpu_mesh, distributed
from support.surface.errors import says

OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "asgd": (optim.ASGD, {"lr": 0.1, "t0": 1.0}),
    "adadelta": (optim.Adadelta, {}),
    "adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "adam": (optim.Adam, {"amsgrad": True}),
    "adam-foreach": (optim.Adam, {"foreach": True}),
    "adamw": (optim.AdamW, {"weight_decay": 0.1}),
    "adamw-fused": (optim.AdamW, {"fused": True}),
    "adamax": (optim.Adamax, {}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd-plain": (optim.SGD, {"lr": 0.1}),
}

# torch has no form of it that takes DTensors; shards are plain.
RPROP: dict[str, Any] = {"lr": 0.02}
ADAM: Any = sys.modules["torch.optim.adam"]  # torch.optim hides its submodules


def _net() -> Any:
    """Uneven shards, one of no row on some ranks, a 0-d parameter, and one without a gradient."""
    torch.manual_seed(7)
    return Assembled(
        lambda m, x: m.gain * m.body(x),
        body=nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)),
        gain=nn.Parameter(torch.tensor(1.5)),
        unused=nn.Parameter(torch.ones(3)),
    ).double()


def _model() -> Any:
    model = _net()
    fully_shard(model.body, mesh=cpu_mesh())
    return fully_shard(model, mesh=cpu_mesh())


def _subclass(kind: type[optim.Optimizer]) -> type[Any]:
    return type("Mine", (kind,), {})


def _backward(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss: torch.Tensor = model(torch.randn(4, 5, generator=generator).double()).square().mean()
    loss.backward()
    return loss


def _train(model: nn.Module, optimizer: optim.Optimizer, steps: range = range(3)) -> None:
    for step in steps:
        _backward(model, step)
        clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(
    one: Any,
    other: Any,
    ours: optim.Optimizer,
    theirs: optim.Optimizer,
    tolerance: Tolerance = EXACT,
) -> None:
    assert_equal(parameters_of(one), parameters_of(other), tolerance, "parameters")
    states: list[Any] = [get_optimizer_state_dict(*pair) for pair in ((one, ours), (other, theirs))]
    mine, its = states
    assert mine["param_groups"] == its["param_groups"]
    assert mine["state"].keys() == its["state"].keys()
    for name, values in its["state"].items():
        assert mine["state"][name].keys() == values.keys()
        for key, value in values.items():
            found = mine["state"][name][key]
            assert type(found) is type(value), (name, key)
            if isinstance(value, DTensor):
                assert isinstance(found, DTensor)
                assert found.placements == value.placements
                found, value = found.full_tensor(), value.full_tensor()
            pair = torch.as_tensor(found), torch.as_tensor(value)
            assert_equal({key: pair[0]}, {key: pair[1]}, tolerance, name)


@pytest.mark.parametrize("name", few(OPTIMIZERS, "adam-foreach", "adamw", "adamw-fused", "sgd"))
@distributed(2)
def test_steps_and_state_are_those_on_dtensors_to_the_last_bit(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    one, other = _model(), _model()
    ours = kind(one.parameters(), **options)
    theirs = _subclass(kind)(other.parameters(), **options)
    for first in (0, 3):
        _train(one, ours, range(first, first + 3))
        _train(other, theirs, range(first, first + 3))
        _assert_same(one, other, ours, theirs)
        for optimizer in (ours, theirs):  # and on, from a state that was loaded
            optimizer.load_state_dict(optimizer.state_dict())


@distributed(2)
def test_an_optimizer_that_torch_has_for_no_dtensor_trains_as_on_the_unsharded_model() -> None:
    sharded, plain = _model(), _net()
    ours, theirs = optim.Rprop(sharded.parameters(), **RPROP), optim.Rprop(plain.parameters())
    theirs.param_groups[0].update(RPROP)
    for step in range(4):
        inputs = torch.full((2, 5), 0.1 * step + 0.1).double()  # the same on all ranks
        for model, optimizer in ((sharded, ours), (plain, theirs)):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(parameters_of(sharded), parameters_of(plain), rounding(2), "parameters")


@pytest.mark.parametrize("cleared", ["pre", "post", "both"])
@distributed(2)
def test_after_a_user_cleared_an_optimizers_hooks_it_steps_and_keeps_state_as_before(
    cleared: str,
) -> None:
    def train(clears: bool) -> tuple[Any, optim.Optimizer]:
        model = _model()
        first, *others = model.parameters()
        optimizer = optim.AdamW([first])
        _train(model, optimizer)
        for when in ("pre", "post") if clears else ():
            if cleared in (when, "both"):
                getattr(optimizer, f"_optimizer_step_{when}_hooks").clear()
        optimizer.add_param_group({"params": others})
        _train(model, optimizer, range(3, 6))
        return model, optimizer

    (one, ours), (other, theirs) = train(True), train(False)
    _assert_same(one, other, ours, theirs)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # the compiler's
@distributed(2)
def test_a_compiled_step_is_the_step_as_it_is() -> None:
    """But for rounding: torch 2.11's compiled step rounds plain parameters differently, too."""

    def train(*, compiles: bool) -> tuple[Any, optim.Optimizer]:
        model = _model()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for number in range(3):
            _backward(model, number)
            step()
            optimizer.zero_grad()
        return model, optimizer

    (one, ours), (other, theirs) = train(compiles=True), train(compiles=False)
    _assert_same(one, other, ours, theirs, rounding(dist.get_world_size(), steps=3))


def _stepped(optimizer: optim.Optimizer) -> set[type]:
    """The classes of what a step of AdamW is given."""
    seen: set[type] = set()
    real: Any = ADAM.adam

    def look(params: list[torch.Tensor], grads: list[torch.Tensor], *rest: Any, **kw: Any) -> Any:
        seen.update(map(type, [*params, *grads]))
        return real(params, grads, *rest, **kw)

    with mock.patch.object(ADAM, "adam", look):
        optimizer.step()
    return seen


@pytest.mark.parametrize("module", [optim.Adafactor.__module__, "transformers.optimization"])
@distributed(2)
def test_adafactor_steps_whole_parameters_and_refuses_parts_of_them(module: str) -> None:
    kind: Any = type("Adafactor", (optim.Adafactor,), {"__module__": module})
    torch.manual_seed(0)
    plain = nn.Linear(6, 4)
    whole: Any = replicate(copy.deepcopy(plain), mesh=cpu_mesh())
    cut: Any = fully_shard(copy.deepcopy(plain), mesh=cpu_mesh())
    inputs = torch.randn(3, 6)
    optimizers = {model: kind(model.parameters(), lr=0.1) for model in (plain, whole, cut)}
    for _ in range(3):
        for model, optimizer in optimizers.items():
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            if model is cut:
                with pytest.raises(TypeError, match=r"each rank has a part of weight.*AdamW"):
                    optimizer.step()
            else:
                optimizer.step()
    for mine, wanted in zip(whole.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), wanted.data)


@pytest.mark.parametrize("meshes", ["one", "none given", "equal"])
@distributed(2)
def test_the_exact_classes_step_on_plain_tensors_and_their_subclasses_on_dtensors(
    meshes: str,
) -> None:
    model = _model() if meshes == "one" else _net()
    for module in () if meshes == "one" else (model.body, model):
        equal = init_device_mesh("cpu", (dist.get_world_size(),)) if meshes == "equal" else None
        fully_shard(module, mesh=equal)
    _backward(model, 0)
    assert _stepped(optim.AdamW(model.parameters())) == {nn.Parameter, torch.Tensor}
    assert _stepped(_subclass(optim.AdamW)(model.parameters())) == {DTensor}


def _slower(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.param_groups[0]["lr"] /= 2


def _no_gradient_for_the_gain(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer.param_groups[0]["params"][0].grad = None


def _replace_values(optimizer: optim.Optimizer) -> None:
    for values in optimizer.state.values():
        values["exp_avg"] = torch.zeros_like(values["exp_avg"])


def _replace_dicts(optimizer: optim.Optimizer) -> None:
    for param, values in list(optimizer.state.items()):
        optimizer.state[param] = {key: value.clone() for key, value in values.items()}
        optimizer.state[param]["step"] += 10


def _forget_one(optimizer: optim.Optimizer) -> None:
    del optimizer.state[next(iter(optimizer.state))]


def _forget_all(optimizer: optim.Optimizer) -> None:
    optimizer.state.clear()


def _exchange_names(optimizer: optim.Optimizer) -> None:
    """No object is another one, only what they are called."""
    for values in optimizer.state.values():
        values["exp_avg"].abs_()
        found = list(values.values())
        values.clear()
        values.update(zip(("step", "exp_avg_sq", "exp_avg"), found, strict=True))


def _other_group(optimizer: optim.Optimizer) -> None:
    """The parameters are in the order in which they were, in another group."""
    one, other = (group["params"] for group in optimizer.param_groups)
    other.insert(0, one.pop())


# -- programs, on plain shards and on DTensors ----------------------------------------------------


def _changed(model: Any, kind: Any, change: Callable[..., None]) -> Any:
    params = list(model.parameters())
    optimizer = kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}])
    _train(model, optimizer)
    change(optimizer)
    _train(model, optimizer, range(3, 6))
    return optimizer


def _hooked(model: Any, kind: Any, hook: Callable[..., None]) -> Any:
    optimizer = kind(model.parameters())
    _train(model, optimizer, range(1))
    optimizer.register_step_pre_hook(hook)
    _train(model, optimizer, range(1, 3))
    return optimizer


def _scheduled(model: Any, kind: Any) -> Any:
    """With a scheduler, and a group that is added later."""
    optimizer = kind(model.body.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": [model.gain], "lr": 0.01})
        _backward(model, step)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return optimizer


def _closed(model: Any, kind: Any) -> Any:
    optimizer = kind(model.parameters())

    def closure(step: int) -> float:
        optimizer.zero_grad()
        return _backward(model, step).item()

    for step in range(3):
        assert optimizer.step(partial(closure, step)) is not None
    return optimizer


def _closed_and_changed(model: Any, kind: Any) -> Any:
    optimizer = kind(model.parameters())
    _train(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = 0.5
        _forget_one(optimizer)
        return _backward(model, 3)

    optimizer.step(closure)
    optimizer.zero_grad()
    _train(model, optimizer, range(4, 6))
    return optimizer


def _raised_halfway(model: Any, kind: Any) -> Any:
    """Steps raise at the second group; the first has its new parameters and state."""
    params = list(model.parameters())
    optimizer = kind([{"params": params[:2]}, {"params": params[2:]}])
    for step in range(3):
        second = optimizer.param_groups[1]
        rate, second["lr"] = second["lr"], "no number"
        _backward(model, step)
        with pytest.raises(TypeError):
            optimizer.step()
        second["lr"] = rate
        _train(model, optimizer, range(step, step + 1))
    return optimizer


CHANGES = (
    _replace_values,
    _replace_dicts,
    _forget_one,
    _forget_all,
    _exchange_names,
    _other_group,
)
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    **{each.__name__: partial(_changed, change=each) for each in CHANGES},
    "a hook sets the rate": partial(_hooked, hook=_slower),
    "a hook drops a gradient": partial(_hooked, hook=_no_gradient_for_the_gain),
    "a scheduler and another group": _scheduled,
    "steps that raise": _raised_halfway,
    "a closure": _closed,
    "a closure that changes things": _closed_and_changed,
}


@pytest.mark.parametrize(
    "program",
    few(
        PROGRAMS,
        "_replace_values",
        "_forget_one",
        "_exchange_names",
        "a hook drops a gradient",
        "a scheduler and another group",
        "steps that raise",
        "a closure",
    ),
)
@distributed(2)
def test_a_program_leaves_the_same_on_plain_shards_and_on_dtensors(program: str) -> None:
    one, other = _model(), _model()
    ours = PROGRAMS[program](one, optim.AdamW)
    theirs = PROGRAMS[program](other, _subclass(optim.AdamW))
    _assert_same(one, other, ours, theirs)


@distributed(2)
def test_a_state_that_is_made_after_a_parameter_left_is_the_only_new_one() -> None:
    model = _model()
    optimizer = optim.AdamW(model.parameters())
    _train(model, optimizer)
    known = set(optimizer.state)
    optimizer.param_groups[0]["params"].pop(0)
    model.unused.grad = torch.ones_like(model.unused)
    optimizer.step()
    assert set(optimizer.state) - known == {model.unused}


@distributed(2)
def test_parameters_that_moved_are_stepped_where_they_are() -> None:
    model = _model()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    _train(model, optimizer)
    model.float()
    before = [param.full_tensor().detach().clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), old - 1)


@distributed(2)
def test_a_users_hook_after_the_step_sees_its_result() -> None:
    model = _model()
    optimizer = optim.AdamW(model.parameters())
    seen: list[Any] = []

    def look(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.extend(dict(each) for each in optimizer.state.values())

    optimizer.register_step_post_hook(look)
    _train(model, optimizer, range(1))
    assert seen and all(isinstance(each["exp_avg"], DTensor) for each in seen)


@distributed(2)
def test_a_gradient_that_a_closure_cuts_otherwise_is_refused_by_name() -> None:
    model = _model()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    before = parameters_of(model)

    def closure() -> float:
        for param in model.parameters():
            ones: Any = torch.ones_like(param)
            param.grad = ones.redistribute(placements=[Replicate()])
        return 0.0

    with pytest.raises(RuntimeError, match=says("closure", "SGD.step()", "placements")):
        optimizer.step(closure)
    assert_equal(parameters_of(model), before, EXACT, "nothing was stepped")


@distributed(2)
def test_plain_and_sharded_parameters_in_one_optimizer() -> None:
    plain, model = nn.Linear(5, 5).double(), _model()
    optimizer = optim.AdamW([*plain.parameters(), *model.parameters()], fused=True)
    alone = nn.Linear(5, 5).double()
    alone.load_state_dict(plain.state_dict())
    other = optim.AdamW(alone.parameters(), fused=True)
    for step in range(2):
        _backward(model, step)
        for each, stepped in ((plain, optimizer), (alone, other)):
            each(torch.full((2, 5), 1.0 + step).double()).square().sum().backward()
            stepped.step()
            stepped.zero_grad()
    found, wanted = dict(plain.named_parameters()), dict(alone.named_parameters())
    assert_equal(found, wanted, rounding(1), "plain")  # fused kernels round by alignment


@distributed(2)
def test_a_gradient_is_not_kept_after_it_was_dropped() -> None:
    model = _model()
    optimizer = optim.AdamW(model.parameters())
    _train(model, optimizer, range(1))
    _backward(model, 1)
    gone = weakref.ref(model.gain.grad._local_tensor)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("held", [False, True], ids=["alone", "by its model"])
@distributed(2)
def test_an_optimizer_that_nobody_holds_goes_with_the_model_that_holds_it(held: bool) -> None:
    model = _model()
    optimizer = optim.AdamW(model.parameters())
    _train(model, optimizer, range(2))
    gone: list[Any] = [weakref.ref(optimizer)]
    if held:
        model.optimizer = optimizer
        gone.append(weakref.ref(model))
        del model
    del optimizer
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


@distributed(2)
def test_a_gradient_that_is_cut_otherwise_is_stepped_as_torch_would() -> None:
    model = _model()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    before = model.gain.full_tensor().detach().clone()
    gradient = DTensor.from_local(torch.tensor(1.0).double(), model.gain.device_mesh)
    model.gain.grad = gradient.redistribute(placements=model.gain.placements)
    optimizer.step()
    assert torch.equal(model.gain.full_tensor(), before - 1)
