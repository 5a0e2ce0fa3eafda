"""Memory of gradients that is filled again, unless somebody still looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from fullshard.sharding import fully_shard
from support.ranks import distributed


def make() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5, bias=False))
    fully_shard(model[0])
    return fully_shard(model)


def backward(model: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(3, 6, generator=generator)).square().sum().backward()


def gradients_of(model: Any) -> list[torch.Tensor]:
    """Copies of this rank's gradients."""
    return [param.grad.to_local().clone() for param in model.parameters()]


def places_of(model: Any) -> list[int]:
    return [param.grad.to_local().data_ptr() for param in model.parameters()]


def fresh_gradients(step: int) -> list[torch.Tensor]:
    """The gradients of that step where nothing was computed before."""
    model = make()
    backward(model, step)
    return gradients_of(model)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@distributed(2)
def test_gradients_that_nobody_keeps_lie_where_those_before_lay() -> None:
    model = make()
    places = []
    for step in range(3):
        backward(model, step)
        places.append(places_of(model))
        assert_same(gradients_of(model), fresh_gradients(step))
        model.zero_grad()
    assert places[0] == places[1] == places[2]


def shard_of(gradient: Any) -> torch.Tensor:
    shard: torch.Tensor = gradient.to_local()
    return shard


LOOKS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], torch.Tensor]]] = {
    "the gradient": (lambda grad: grad, shard_of),
    "its shard": (shard_of, lambda kept: kept),
    "its shard, taken without gradients": (torch.no_grad()(shard_of), lambda kept: kept),
    "a view": (lambda grad: shard_of(grad).detach()[:1], lambda kept: kept),
    "an array": (lambda grad: shard_of(grad).detach().numpy(), torch.from_numpy),
    "the memory": (
        lambda grad: (shard_of(grad).untyped_storage(), shard_of(grad).storage_offset()),
        lambda kept: torch.empty(0).set_(kept[0], kept[1], (3,), (1,)),
    ),
    "a capsule": (lambda grad: to_dlpack(shard_of(grad).detach()), from_dlpack),
    "a sum": (lambda grad: grad + 0, shard_of),
}


@pytest.mark.parametrize("look", LOOKS)
@distributed(2)
def test_a_gradient_that_somebody_keeps_is_left_alone(look: str) -> None:
    keep, read = LOOKS[look]
    model = make()
    backward(model, 0)
    kept = [keep(param.grad) for param in model.parameters()]
    model.zero_grad()
    for step in range(1, 4):
        backward(model, step)
        assert_same(gradients_of(model), fresh_gradients(step))
        model.zero_grad()
    reference = make()
    backward(reference, 0)
    again = [keep(param.grad) for param in reference.parameters()]
    assert_same([read(each) for each in kept], [read(each) for each in again])


@distributed(2)
def test_gradients_that_stay_are_added_to() -> None:
    model = make()
    expected: list[torch.Tensor] = []
    for step in range(3):
        backward(model, step)
        single = fresh_gradients(step)
        expected = [a + b for a, b in zip(expected, single, strict=True)] if expected else single
        assert_same(gradients_of(model), expected)
    model.zero_grad(set_to_none=False)
    backward(model, 3)
    assert_same(gradients_of(model), fresh_gradients(3))


@distributed(2)
def test_a_gradient_that_is_part_of_a_graph_is_left_alone() -> None:
    model = make()
    backward(model, 0)
    gradients = [param.grad.to_local() for param in model.parameters()]
    weights = [torch.ones_like(each, requires_grad=True) for each in gradients]
    total = sum((weight * each).sum() for weight, each in zip(weights, gradients, strict=True))
    expected = gradients_of(model)
    del gradients
    model.zero_grad()
    backward(model, 1)
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert_same([weight.grad for weight in weights if weight.grad is not None], expected)


@distributed(2)
def test_a_backward_that_is_repeated_before_a_step_does_not_lose_the_first() -> None:
    model = make()
    output = model(torch.ones(2, 6)).square().sum()
    output.backward(retain_graph=True)
    once = gradients_of(model)
    output.backward()
    assert_same(gradients_of(model), [2 * each for each in once])
