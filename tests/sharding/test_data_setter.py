"""Values that users put into sharded parameters and gradients by other ways than in place."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.insight import debug_mode
from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.ranks import distributed


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


def used(precision: MixedPrecisionPolicy | None = None) -> Any:
    """A sharded model after a step, and so with all that steps keep; its optimizer."""
    policy = MixedPrecisionPolicy() if precision is None else precision
    model: Any = fully_shard(net(), mp_policy=policy)
    model(batch()).sum().backward()
    model.zero_grad()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def filled(value: float) -> nn.Sequential:
    model = net()
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


def assert_steps_as(model: Any, optimizer: torch.optim.Optimizer, expected: nn.Module) -> None:
    optimizer.step()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other)


def assert_trains_as(model: Any, optimizer: torch.optim.Optimizer, expected: nn.Module) -> None:
    """Whether it has the values, and learns from them, of an unsharded model."""
    torch.testing.assert_close(model(batch()), expected(batch()))
    for each in (model, expected):
        each(batch()).square().sum().backward()
    assert_steps_as(model, optimizer, expected)
    torch.testing.assert_close(model(batch()), expected(batch()))


def _data(model: Any) -> None:
    for param in model.parameters():
        param.data = torch.full_like(param, 0.5)


def _full(model: Any) -> None:
    for param in model.parameters():
        param.data = torch.full(param.shape, 0.5)


def _aliased(model: Any) -> None:
    for param in model.parameters():
        new = torch.zeros_like(param)
        param.data = new
        new.fill_(0.5)


USES: dict[str, Callable[[Any, torch.optim.Optimizer], object]] = {
    "forward": lambda model, optimizer: model(batch()),
    "step": lambda model, optimizer: optimizer.step(),
    "unshard": lambda model, optimizer: model.unshard(),
    "state dict": lambda model, optimizer: model.state_dict(),
}


@pytest.mark.parametrize("change", [_data, _full, _aliased])
@pytest.mark.parametrize("use", USES)
@distributed(2)
def test_after_data_of_a_parameter_was_set_its_next_use_is_an_error_and_nothing_changed(
    use: str, change: Callable[[Any], None]
) -> None:
    model, optimizer = used()
    text = r"^0\.weight\.data, 0\.bias\.data, .* was set, but a"
    for _ in range(2):  # a second assignment is an error, too
        change(model)
        with pytest.raises(RuntimeError, match=text):
            USES[use](model, optimizer)
    assert_trains_as(model, optimizer, net())


@pytest.mark.parametrize("accumulated", [False, True])
@distributed(2)
def test_after_data_of_a_gradient_was_set_a_step_is_an_error(
    accumulated: bool,
) -> None:
    model, optimizer = used()
    model(batch()).sum().backward()
    bias = model[0].bias
    bias.grad.data = torch.full_like(bias.grad, 0.5)
    if accumulated:
        model(batch()).sum().backward()
    with pytest.raises(RuntimeError, match=r"^0\.bias\.grad\.data was set, but a DTensor keeps"):
        optimizer.step()
    model.zero_grad()
    assert_trains_as(model, optimizer, net())


@distributed(2)
def test_gradients_that_a_user_assigns_moves_or_copies_are_no_error() -> None:
    model, optimizer = used()
    expected = net()
    for each in (model, expected):
        each(batch()).sum().backward()
        params: list[Any] = list(each.parameters())
        for param in params:
            param.grad = param.grad.detach() * 0.5
    model.double().float()
    copies = [copy.deepcopy(param.grad) for param in model.parameters()]
    for param, gradient in zip(model.parameters(), copies, strict=True):
        param.grad = gradient
    assert_steps_as(model, optimizer, expected)


@distributed(2)
def test_a_saved_gradient_is_loaded_as_torch_loads_it_by_default() -> None:
    model, optimizer = used()
    model(batch()).sum().backward()
    file = io.BytesIO()
    torch.save(model[0].weight.grad, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded.to_local(), model[0].weight.grad.to_local())
    model[0].weight.grad = loaded
    optimizer.step()


@distributed(2)
def test_a_parameter_that_is_assigned_to_a_module_is_used_and_trained() -> None:
    model, _ = used()
    for layer in model:
        for name, param in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(torch.full_like(param, 0.5)))
    assert_trains_as(model, torch.optim.SGD(model.parameters(), lr=0.1), filled(0.5))


@pytest.mark.parametrize("move", ["swap", "to", "load", "assign"])
@distributed(2)
def test_what_else_replaces_the_memory_of_a_parameter_is_no_error(move: str) -> None:
    model, optimizer = used()
    if move == "swap":
        for param in model.parameters():
            torch.utils.swap_tensors(param, nn.Parameter(torch.full_like(param, 0.5)))
    elif move == "to":
        model.double().float()
    else:
        full = {name: torch.full(p.shape, 0.5) for name, p in model.named_parameters()}
        model.load_state_dict(full, assign=move == "assign")
    if move == "assign":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    assert_trains_as(model, optimizer, net() if move == "to" else filled(0.5))


@distributed(2)
def test_a_plain_parameter_put_in_place_after_use_is_an_error_and_the_old_one_can_come_back() -> (
    None
):
    model, optimizer = used()
    weight = model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"0\.weight was replaced by a Parameter of shape"):
        model(batch())
    model[0].weight = weight
    assert_trains_as(model, optimizer, net())


def _copied(param: Any) -> None:
    with torch.no_grad():
        param.copy_(torch.full_like(param, 0.5))


def _moved(param: Any) -> None:
    param.data = torch.full_like(param, 0.5)


@pytest.mark.cross
@pytest.mark.parametrize("change", [_copied, _moved])
@pytest.mark.parametrize("then", ["forward", "backward", "reshard"])
@distributed(2)
def test_full_parameters_that_were_changed_while_idle_are_an_error_in_debug_mode(
    then: str, change: Callable[[Any], None]
) -> None:
    with debug_mode():
        model, optimizer = used()
        loss = None
        if then == "backward":
            loss = model(batch()).sum()
        else:
            with torch.no_grad():
                model(batch())
        assert not isinstance(model[0].weight, DTensor)
        change(model[0].weight)
        with pytest.raises(RuntimeError, match=r"^0\.weight changed while full"):
            model.reshard() if then == "reshard" else model(
                batch()
            ) if loss is None else loss.backward()
        if then != "reshard":  # which left nothing open
            model.reset_iter_state()
            model.zero_grad()
        assert_trains_as(model, optimizer, net())


@distributed(2)
def test_parameters_that_forward_itself_changes_are_no_error() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 2)))
    for _ in range(2):
        with torch.no_grad():
            model(torch.arange(6))
        model(torch.arange(6)).sum().backward()
