"""The group of a norm, which the next norm of the same parameters uses again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fullshard.optim import grad_norm
from fullshard.sharding import fully_shard
from support.ranks import distributed


def two_linears(kind: type[nn.Sequential] = nn.Sequential) -> Any:
    """Two linears, the second of which other modules may hold, too."""
    torch.manual_seed(2)
    return kind(OrderedDict(first=nn.Linear(6, 6), second=nn.Linear(6, 6)))


class Chosen(nn.Sequential):
    """A model that counts only its first linear among its parameters."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.get_submodule("first").parameters(recurse)


def trained(kind: type[nn.Sequential] = nn.Sequential) -> tuple[Any, Any]:
    """A sharded model and the unsharded one, after one backward on the same rows on each rank."""
    model, whole = two_linears(kind), two_linears(kind)
    fully_shard(model)
    for each in (model, whole):
        each(torch.arange(12.0).view(2, 6)).square().sum().backward()
    return model, whole


def assert_same_norm(model: nn.Module, whole: nn.Module) -> torch.Tensor:
    """The norm of all gradients, which is that of the unsharded model."""
    norm = grad_norm(model)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(grads_of(whole)))
    return norm


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


@distributed(2)
def test_a_later_norm_counts_what_is_there_then() -> None:
    model, whole = trained()
    norms = [assert_same_norm(model, whole)]
    for each in (model, whole):
        each.first.bias.grad = None  # counted no longer
    norms.append(assert_same_norm(model, whole))
    for each in (model, whole):
        each.extra = nn.Parameter(torch.ones(3))  # on every rank, and in no group
        each.extra.grad = torch.full((3,), 1e4)
    norms.append(assert_same_norm(model, whole))
    for each in (model, whole):
        del each.second
    norms.append(assert_same_norm(model, whole))
    assert len({norm.item() for norm in norms}) == len(norms)


@distributed(2)
def test_a_gradient_that_is_cut_otherwise_counts_once() -> None:
    model, whole = trained()
    before = assert_same_norm(model, whole)
    weight = model.first.weight
    assert isinstance(weight.grad, DTensor)
    weight.grad = weight.grad.redistribute(placements=[Replicate()])
    assert torch.equal(assert_same_norm(model, whole), before)


@distributed(2)
def test_the_norm_has_the_dtype_of_the_parameters_as_they_are_now() -> None:
    model, _ = trained()
    assert grad_norm(model).dtype is torch.float32
    model.double()
    assert grad_norm(model).dtype is torch.float64


@distributed(2)
def test_a_process_group_that_was_given_before_is_not_that_of_this_norm() -> None:
    model, whole = trained()
    groups = [dist.new_group([rank]) for rank in range(2)]
    assert_same_norm(model, whole)
    with pytest.raises(ValueError, match="process_group lacks ranks"):
        grad_norm(model, process_group=groups[dist.get_rank()])
    torch.testing.assert_close(grad_norm(model, process_group=dist.group.WORLD), grad_norm(model))
    assert_same_norm(model, whole)


@distributed(2)
def test_a_module_says_itself_which_its_parameters_are() -> None:
    model, whole = trained(Chosen)
    assert_same_norm(model, whole)
    assert grad_norm(model) != grad_norm([*model.first.parameters(), *model.second.parameters()])


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, float("inf")])
@distributed(2)
def test_small_gradients_and_large_ones_have_the_norm_of_one_kernel_each(order: float) -> None:
    model = nn.Sequential(*(nn.Linear(n, n) for n in (4, 6, 200)))
    fully_shard(model)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        local = torch.randn_like(param.to_local())
        param.grad = DTensor.from_local(local, param.device_mesh, param.placements)
    for some in (model, model[:2], model[0].weight):
        torch.testing.assert_close(grad_norm(some, order), grad_norm(some, order, foreach=False))


@distributed(2)
def test_a_norm_of_two_models_leaves_each_with_its_own() -> None:
    (one, whole), (other, _) = trained(), trained()
    both = grad_norm([*one.parameters(), *other.parameters()])
    torch.testing.assert_close(both, grad_norm(one) * 2**0.5)
    assert_same_norm(one, whole)


@distributed(2)
def test_as_many_other_parameters_have_a_norm_of_their_own() -> None:
    model, whole = trained()
    for name in ("first.bias", "second.weight", "second.bias"):
        some = [model.first.weight, model.get_parameter(name)]
        wanted = nn.ParameterList([whole.first.weight, whole.get_parameter(name)])
        norm = torch.nn.utils.get_total_norm(grads_of(wanted))
        torch.testing.assert_close(grad_norm(some), norm)


@distributed(2)
def test_parameters_from_before_stand_for_those_that_replaced_them_last() -> None:
    model = two_linears()
    before = list(model.parameters())
    fully_shard(model)
    x = torch.arange(12.0).view(2, 6)
    model(x).square().sum().backward()
    first = grad_norm(before)
    held = {name: (value * 2).detach() for name, value in model.state_dict().items()}
    model.load_state_dict(held, assign=True)
    model(x).square().sum().backward()
    assert grad_norm(before) == grad_norm(model) != first
