"""Steps beside backward: those of the wrapped optimizer, begun early, with errors on all ranks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import Optimizer

from fullshard.comm import Event, EventKind, observe
from fullshard.optim import (
    AdamW8bit,
    OverlappedStep,
    OverlappedStepError,
    clip_grad_norm_,
    grad_norm,
)
from fullshard.optim.base.parts import SteppedGradients
from fullshard.policies import CanonicalOrder, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from fullshard.sharding import FSDPModule, fully_shard
from support.optim.offloaded import adamw, assert_equal_runs, groups_of_parameters, part
from support.ranks import cpu_mesh, distributed
from support.surface.model import Net, batch, build, sharded
from support.surface.ranks import everyone

OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
STEPS = 3


def backward(model: nn.Module, number: int) -> None:
    model(batch(number)).square().mean().backward()


def run(
    model: nn.Module, optimizer: OverlappedStep, *, micro_batches: int = 1
) -> list[torch.Tensor | None]:
    """Train with steps beside the last backward of each; the norms."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms = []
    for step in range(STEPS):
        for number in range(micro_batches - 1):
            backward(model, 10 * step + number)
        with optimizer.overlap():
            backward(model, 10 * step + micro_batches - 1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        norms.append(optimizer.total_norm)
    return norms


def run_plainly(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    micro_batches: int = 1,
    max_norm: float = 0.0,
    previous: bool = False,
) -> list[torch.Tensor]:
    """The same loop without overlap: clipped by the norm of the gradients, or of the last step."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms: list[torch.Tensor] = []
    for step in range(STEPS):
        for number in range(micro_batches):
            backward(model, 10 * step + number)
        total = grad_norm(model).cpu()
        if max_norm:
            by = norms[-1] if previous and norms else total
            scale = (max_norm / (by + 1e-6)).clamp(max=1.0)
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.mul_(scale)
            if previous and norms:
                total = grad_norm(model).cpu() / scale
        norms.append(total)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return norms


def assert_stepped_alike(
    mine: nn.Module,
    theirs: nn.Module,
    make: Callable[[nn.Module], Optimizer] = adamw,
    micro_batches: int = 1,
) -> None:
    """Training with steps beside backward is that with the wrapped optimizer, to the bit."""
    one, other = OverlappedStep(make(mine), mine), make(theirs)
    run(mine, one, micro_batches=micro_batches)
    run_plainly(theirs, other, micro_batches=micro_batches)
    assert_equal_runs(mine, one, theirs, other)


MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "fused": lambda model: adamw(model, fused=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "no state": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "groups": groups_of_parameters,
}


@pytest.mark.device(paces=True)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
@distributed(2)
def test_steps_equal_those_of_the_wrapped_optimizer_to_the_bit(
    name: str, micro_batches: int
) -> None:
    mine, theirs = sharded(build(), **OFFLOAD), sharded(build(), **OFFLOAD)
    assert_stepped_alike(mine, theirs, MAKERS[name], micro_batches)


@pytest.mark.device(paces=True)
@pytest.mark.parametrize("norm", ["exact", "previous"])
@distributed(2)
def test_clipping_is_that_of_the_plain_loop_to_the_bit(norm: Any) -> None:
    mine, theirs = sharded(build(), **OFFLOAD), sharded(build(), **OFFLOAD)
    one, other = OverlappedStep(adamw(mine), mine, max_norm=0.05, norm=norm), adamw(theirs)
    norms = run(mine, one, micro_batches=2)
    expected = run_plainly(
        theirs, other, micro_batches=2, max_norm=0.05, previous=norm == "previous"
    )
    assert_equal_runs(mine, one, theirs, other)
    assert [float(each) for each in norms if each is not None] == list(map(float, expected))


@distributed(2)
def test_clipping_holds_for_parameters_of_another_optimizer() -> None:
    """All gradients are scaled in the first step, which a second optimizer then steps with."""
    mine, theirs = sharded(build()), sharded(build())
    firsts: list[Optimizer] = []
    norms: list[float] = []
    for model in (mine, theirs):
        params = list(model.parameters())
        first: Optimizer = torch.optim.AdamW(params[:6], lr=0.1)
        second = torch.optim.SGD(params[6:], lr=0.1)
        if model is mine:
            first = OverlappedStep(first, model, max_norm=0.05, norm="previous")
        by: torch.Tensor | None = None
        for step in range(3):
            with first.overlap() if isinstance(first, OverlappedStep) else nullcontext():
                backward(model, step)
            if model is theirs:
                total = grad_norm(model)
                scale = (0.05 / ((total if by is None else by) + 1e-6)).clamp(max=1.0)
                for param in params:
                    if param.grad is not None:
                        param.grad.mul_(scale)
                by = grad_norm(model) / scale if step else total
                norms.append(by.item())
            first.step()
            if isinstance(first, OverlappedStep) and first.total_norm is not None:
                norms.append(first.total_norm.item())
            second.step()
            model.zero_grad()
        firsts.append(first)
    assert_equal_runs(mine, firsts[0], theirs, firsts[1])
    assert norms[:3] == norms[3:]


@distributed(2)
def test_a_run_with_the_norm_of_the_last_step_goes_on_to_the_bit() -> None:
    runs = []
    for loads in (False, True):
        model = sharded(build())
        optimizer = OverlappedStep(adamw(model), model, max_norm=0.05, norm="previous")
        for step in range(4):
            if loads and step == 2:
                saved, norm = copy.deepcopy(optimizer.state_dict()), optimizer.total_norm
                optimizer = OverlappedStep(adamw(model), model, max_norm=0.05, norm="previous")
                optimizer.load_state_dict(saved)
                optimizer.total_norm = norm
            with optimizer.overlap():
                backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer))
    assert_equal_runs(*runs[0], *runs[1])


@distributed(2)
def test_saving_before_the_first_step_leaves_its_norm_exact() -> None:
    """A call of ``get_state_dict`` steps with gradients of zeros, whose norm bounds nothing."""
    runs = []
    for saves in (False, True):
        model = sharded(build())
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = OverlappedStep(plain, model, max_norm=0.05, norm="previous")
        if saves:
            get_state_dict(model, optimizer)
        with optimizer.overlap():
            backward(model, 0)
        optimizer.step()
        runs.append((model, optimizer))
    assert_equal_runs(*runs[0], *runs[1])


def _whole(net: Net) -> Net:
    fully_shard(net, offload_policy=CPUOffloadPolicy())
    return net


def _in_canonical_order(net: Net) -> Net:
    sharded(net)
    cast("FSDPModule", net).set_schedule(CanonicalOrder())
    return net


SHARDINGS: dict[str, Callable[[Net], Net]] = {
    "bf16": lambda net: sharded(
        net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), **OFFLOAD
    ),
    "kept after forward": lambda net: sharded(net, reshard_after_forward=False, **OFFLOAD),
    "replicas": lambda net: sharded(net, mesh=cpu_mesh((2, 1), ("replicate", "shard")), **OFFLOAD),
    "one group": _whole,
    "canonical order": _in_canonical_order,
    "not sharded": lambda net: net,
}


@pytest.mark.parametrize("name", SHARDINGS)
@distributed(2)
def test_any_sharding_is_stepped_as_by_the_wrapped_optimizer(name: str) -> None:
    assert_stepped_alike(SHARDINGS[name](build()), SHARDINGS[name](build()))


@distributed(2)
def test_gradients_of_one_reduction_may_be_stepped_apart() -> None:
    """The first backward leaves the gradients of all groups in one buffer."""
    mine, theirs = sharded(build()), sharded(build())
    one, other = OverlappedStep(adamw(mine), mine), adamw(theirs)
    for number in range(4):
        backward(mine, number)
        backward(theirs, number)
    with one.overlap():
        backward(mine, 4)
    backward(theirs, 4)
    one.step()
    other.step()
    assert_equal_runs(mine, one, theirs, other)


@pytest.mark.device(paces=True)
@distributed(2)
def test_a_policy_that_steps_on_the_device_may_overlap_too() -> None:
    policy = CPUOffloadPolicy(optimizer_state=False)
    mine, theirs = sharded(build(), offload_policy=policy), sharded(build(), offload_policy=policy)
    assert_stepped_alike(mine, theirs)


@distributed(2)
def test_an_optimizer_built_before_sharding_and_a_frozen_parameter() -> None:
    runs = []
    for wraps in (True, False):
        model = build()
        next(model.parameters()).requires_grad_(False)
        optimizer = adamw(model)
        sharded(model)
        if wraps:
            optimizer = OverlappedStep(optimizer, model)
            run(model, optimizer)
        else:
            run_plainly(model, optimizer)
        runs.append((model, optimizer))
    assert_equal_runs(*runs[0], *runs[1])


@distributed(2)
def test_gradients_of_backwards_that_were_not_the_last_are_added_before_the_step() -> None:
    mine, theirs = sharded(build()), sharded(build())
    one, other = OverlappedStep(adamw(mine), mine), adamw(theirs)
    for step in range(2):
        for model, optimizer in ((mine, one), (theirs, other)):
            root = cast("FSDPModule", model)
            root.set_is_last_backward(False)
            backward(model, 10 * step)
            root.set_is_last_backward(True)
            with one.overlap() if optimizer is one else nullcontext():
                backward(model, 10 * step + 1)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_runs(mine, one, theirs, other)


@distributed(2)
def test_steps_without_overlap_and_closures_are_ordinary_steps() -> None:
    mine, theirs = sharded(build()), sharded(build())
    one, other = OverlappedStep(adamw(mine), mine), adamw(theirs)
    for model, optimizer in ((mine, one), (theirs, other)):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()

        def closure(model: nn.Module = model) -> float:
            loss = model(batch(1)).square().mean()
            loss.backward()
            return loss.item()

        optimizer.step(closure)
    assert_equal_runs(mine, one, theirs, other)


# -- beside backward ------------------------------------------------------------------------------


@pytest.mark.device(paces=True)
@distributed(2)
def test_a_group_is_stepped_before_backward_ends() -> None:
    """The last group's backward waits for the step of the first: no other order can pass."""
    model = sharded(build(), **OFFLOAD)
    optimizer = OverlappedStep(adamw(model), model)
    last = dict(model.blocks[-1].named_parameters())
    before = {name: part(param).clone() for name, param in last.items()}
    stepped: list[bool] = []

    def look(grad: torch.Tensor) -> None:
        assert optimizer._in_flight is not None
        for each in optimizer._in_flight.steps:
            each.result(timeout=30)
        changed = [not torch.equal(part(p), before[n]) for n, p in last.items() if part(p).numel()]
        stepped.extend(changed)

    with optimizer.overlap():
        inputs = batch(0).requires_grad_()
        inputs.register_hook(look)
        model(inputs).square().mean().backward()
    optimizer.step()
    assert stepped and all(stepped)


@distributed(2)
def test_the_step_runs_on_another_thread_and_backward_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread waits for the end of backward, which comes without it."""
    model = sharded(build())
    optimizer = OverlappedStep(adamw(model), model)
    ended, threads = threading.Event(), set()
    whole = OverlappedStep._step_part

    def late(self: OverlappedStep, *arguments: Any) -> None:
        assert ended.wait(30)
        threads.add(threading.get_ident())
        whole(self, *arguments)

    with monkeypatch.context() as patched, optimizer.overlap():
        patched.setattr(OverlappedStep, "_step_part", late)
        backward(model, 0)
        ended.set()
        optimizer.state  # noqa: B018 # waits for the steps
    optimizer.step()
    assert threads and threading.get_ident() not in threads


@distributed(2)
def test_no_step_runs_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """So nobody reads a parameter, or changes a gradient, in the middle of its step."""
    model = sharded(build())
    optimizer = OverlappedStep(adamw(model), model)
    waited, step_part, wait = threading.Event(), optimizer._step_part, optimizer._wait

    def late(*arguments: Any) -> None:
        assert waited.wait(30)
        step_part(*arguments)

    def noted_wait() -> None:
        waited.set()
        wait()

    monkeypatch.setattr(optimizer, "_step_part", late)
    monkeypatch.setattr(optimizer, "_wait", noted_wait)
    with optimizer.overlap():
        backward(model, 0)
    begun = optimizer._in_flight
    done = [] if begun is None else [each.done() for each in begun.steps]
    waited.set()
    assert done and all(done)
    optimizer.step()


class Reductions:
    """The launches and ends of reductions, in order."""

    def __init__(self) -> None:
        self.kinds: list[EventKind] = []

    def on_event(self, event: Event) -> None:
        if event.kind in (EventKind.REDUCE, EventKind.REDUCE_DONE):
            self.kinds.append(event.kind)


@distributed(2)
def test_gradients_come_at_the_end_of_backward_without_overlap() -> None:
    model = sharded(build())
    backward(model, 0)
    at_end, beside = Reductions(), Reductions()
    with observe(at_end):
        backward(model, 0)
    with observe(beside), OverlappedStep(adamw(model), model).overlap():
        backward(model, 1)
    plain, early = at_end.kinds, beside.kinds
    assert sorted(plain, key=str) == sorted(early, key=str)
    assert plain == [EventKind.REDUCE] * 3 + [EventKind.REDUCE_DONE] * 3
    assert early != plain


# -- state and errors -----------------------------------------------------------------------------


@distributed(2)
def test_a_state_dict_goes_there_and_back() -> None:
    mine, theirs = sharded(build()), sharded(build())
    one, other = adamw(mine), adamw(theirs)
    for each in range(4):
        backward(theirs, each)
        other.step()
        other.zero_grad()
    for each in range(4):
        wrapped = OverlappedStep(adamw(mine), mine)
        if each:
            wrapped.load_state_dict(one.state_dict())
        with wrapped.overlap():
            backward(mine, each)
        wrapped.step()
        wrapped.zero_grad()
        one = adamw(mine)
        one.load_state_dict(wrapped.state_dict())
    assert_equal_runs(mine, one, theirs, other)


@distributed(2)
def test_an_error_of_a_step_comes_on_all_ranks_and_names_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = sharded(build())
    optimizer = OverlappedStep(adamw(model), model)

    def fails(*_: Any) -> None:
        raise MemoryError("no room for the state")

    with monkeypatch.context() as patched, optimizer.overlap():
        if dist.get_rank() == 1:
            patched.setattr(OverlappedStep, "_step_part", fails)
        backward(model, 0)
        optimizer.state  # noqa: B018 # waits for the steps
    text = "rank 1: MemoryError: no room for the state; part of the .* load the last checkpoint"
    with pytest.raises(OverlappedStepError, match=text) as raised:
        optimizer.step()
    assert isinstance(raised.value.__cause__, MemoryError) == (dist.get_rank() == 1)
    with pytest.raises(OverlappedStepError, match="MemoryError"):
        optimizer.step()
    assert everyone([str(raised.value)]) == [[str(raised.value)]] * 2


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda model: [p.grad.mul_(2) for p in model.parameters() if p.grad is not None],
    "clipped by us": lambda model: clip_grad_norm_(model, 1e-3),
    "clipped by torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "set to None": lambda model: model.zero_grad(),
}


@pytest.mark.parametrize("name", CHANGES)
@distributed(2)
def test_gradients_changed_after_their_step_are_an_error(name: str) -> None:
    model = sharded(build())
    optimizer = OverlappedStep(adamw(model), model)
    with optimizer.overlap():
        backward(model, 0)
    optimizer.state  # noqa: B018 # waits for the steps
    CHANGES[name](model)
    with pytest.raises(
        OverlappedStepError, match=r"blocks.*weight.* changed after .*pass max_norm"
    ):
        optimizer.step()


OPTIONS: dict[str, Callable[[Optimizer], object]] = {
    "another rate": lambda optimizer: optimizer.param_groups[0].update(lr=0.2),
    "a tensor in place": lambda optimizer: optimizer.param_groups[0]["lr"].mul_(2),
    "a scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step(),
}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", OPTIONS)
@distributed(2)
def test_options_changed_between_backward_and_step_are_an_error(name: str) -> None:
    model = sharded(build())
    optimizer = OverlappedStep(adamw(model, lr=torch.tensor(0.1), foreach=False), model)
    with optimizer.overlap():
        backward(model, 0)
    OPTIONS[name](optimizer)
    with pytest.raises(OverlappedStepError, match=r"options lr changed .*before the block"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_change_of_any_element_of_a_gradient_is_noticed(offset: int, dtype: torch.dtype) -> None:
    """Also one that leaves the version alone; gradients lie anywhere in the buffer they share."""
    param = nn.Parameter(torch.zeros(151, dtype=dtype))
    param.grad = torch.randn(160).to(dtype)[offset : offset + 151]
    param.grad[70] = torch.nan
    noted = SteppedGradients([param])
    assert not noted.changed()
    for data in param.grad.data:
        before = data.clone()
        data.fill_(1e-3)
        assert noted.changed()
        data.copy_(before)
    assert not noted.changed()


@distributed(2)
def test_a_backward_that_raised_is_an_error_of_the_step_until_a_state_is_loaded() -> None:
    model = sharded(build())
    optimizer = OverlappedStep(adamw(model), model)
    saved = copy.deepcopy(adamw(model).state_dict())

    def fails(grad: torch.Tensor) -> None:
        raise ArithmeticError("in backward")

    inputs = batch(0).requires_grad_()
    inputs.register_hook(fails)
    with pytest.raises(ArithmeticError), optimizer.overlap():
        model(inputs).square().mean().backward()
    with pytest.raises(OverlappedStepError, match=r"overlap\(\) raised"):
        optimizer.step()
    with pytest.raises(KeyError):
        optimizer.load_state_dict({"not": "one"})
    with pytest.raises(RuntimeError, match="last checkpoint"), optimizer.overlap():
        pass
    with pytest.raises(OverlappedStepError, match=r"overlap\(\) raised"):
        optimizer.step()
    cast("FSDPModule", model).reset_iter_state()
    optimizer.load_state_dict(saved)
    with optimizer.overlap():
        backward(model, 1)
    optimizer.step()


WRONG: dict[str, tuple[Callable[[nn.Module], object], type[Exception], str]] = {
    "no optimizer": (lambda m: OverlappedStep(3, m), TypeError, "optimizer is a int"),  # type: ignore[arg-type] # wrong
    "not elementwise": (
        lambda m: OverlappedStep(AdamW8bit(m.parameters()), m),
        TypeError,
        "AdamW8bit; steps beside backward need an elementwise",
    ),
    "no model": (lambda m: OverlappedStep(adamw(m), 3), TypeError, "model is a int"),  # type: ignore[arg-type] # wrong
    "norm": (
        lambda m: OverlappedStep(adamw(m), m, max_norm=1, norm="last"),  # type: ignore[arg-type] # wrong
        ValueError,
        "norm is 'last'",
    ),
    "max_norm": (lambda m: OverlappedStep(adamw(m), m, max_norm=0), ValueError, "max_norm is 0"),
    "text": (
        lambda m: OverlappedStep(adamw(m), m, max_norm="1"),  # type: ignore[arg-type] # wrong
        TypeError,
        "max_norm is '1'",
    ),
    "a copy": (
        lambda m: copy.deepcopy(OverlappedStep(adamw(m), m)),
        TypeError,
        r"cannot be copied.*save its state_dict\(\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str) -> None:
    make, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        make(build())


def test_overlap_is_for_one_backward_of_a_step() -> None:
    model = build()
    optimizer = OverlappedStep(adamw(model), model)
    with optimizer.overlap():
        backward(model, 0)
    with pytest.raises(RuntimeError, match="entered twice"), optimizer.overlap():
        pass


@pytest.mark.device
@distributed(2)
def test_parameters_on_a_device_are_refused_with_what_to_do() -> None:
    model = sharded(build(), offload_policy=OffloadPolicy())
    optimizer = OverlappedStep(adamw(model), model)
    model(batch(0))
    text = "the CPU: pass offload_policy=CPUOffloadPolicy"
    with pytest.raises(ValueError, match=text), optimizer.overlap():
        pass
