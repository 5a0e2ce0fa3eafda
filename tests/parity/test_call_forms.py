"""Whatever goes into a module's forward and comes out, gradients equal the unsharded model's.

What autograd sees of a sharded module is its inputs and outputs: these are the shapes they take.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.sharding import fully_shard
from support.modules import Assembled
from support.parity.compare import assert_equal, gradients_of, rounding
from support.parity.reference import my_rows
from support.products import few
from support.ranks import cpu_mesh, distributed

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    """What a library's models return."""

    loss: torch.Tensor
    extra: dict[str, Any]


def _inner(run: Callable[..., Any]) -> Any:
    """A layer with a forward that the test chooses."""
    return Assembled(run, linear=nn.Linear(5, 5), gate=nn.Parameter(torch.randn(5)))


def _outer(run: Callable[..., torch.Tensor], inner: Callable[..., Any]) -> Any:
    """A model that calls the layer as the test chooses."""
    return Assembled(run, first=nn.Linear(5, 5), inner=_inner(inner), last=nn.Linear(5, 1))


def _plain(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner.linear(x) * inner.gate


def _simple(outer: Any, x: torch.Tensor) -> torch.Tensor:
    return outer.last(outer.inner(outer.first(x)))


def _in_place_on_the_output(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.inner(outer.first(x))
    hidden *= 2
    hidden.add_(x)
    return outer.last(hidden)


def _in_place_on_part_of_the_output(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.inner(outer.first(x))
    hidden[:, 1:3] = x[:, :2]
    hidden[:, 0].mul_(3)
    return outer.last(hidden)


def _view(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return _plain(inner, x).view(-1).view(-1, 5)


def _containers(inner: Any, pair: Pair, *, options: dict[str, Any]) -> Any:
    hidden = _plain(inner, pair.left + options["shift"][0])
    return {"a": [hidden], "b": Pair(hidden * 2, None), "c": ("text", options["shift"][0])}


def _through_containers(outer: Any, x: torch.Tensor) -> torch.Tensor:
    found = outer.inner(Pair(outer.first(x), x), options={"shift": [x.tanh()], "other": None})
    assert isinstance(found["b"], Pair)
    return outer.last(found["a"][0] + found["b"].left + found["c"][1])


def _dataclass(inner: Any, x: torch.Tensor) -> Output:
    return Output(loss=_plain(inner, x).mean(1, keepdim=True), extra={"x": inner.linear(x)})


def _through_a_dataclass(outer: Any, x: torch.Tensor) -> torch.Tensor:
    found = outer.inner(outer.first(x))
    return found.loss + outer.last(found.extra["x"])


def _two_outputs(inner: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return inner.linear(x), x * inner.gate


def _one_output_is_not_used(outer: Any, x: torch.Tensor) -> torch.Tensor:
    return outer.last(outer.inner(outer.first(x))[0])


def _one_output_comes_back_through_the_layer(outer: Any, x: torch.Tensor) -> torch.Tensor:
    left, right = outer.inner(outer.first(x))
    return outer.last(outer.inner(right)[0] + left)


def _input_without_gradient(outer: Any, x: torch.Tensor) -> torch.Tensor:
    return outer.last(outer.inner(x) + outer.first(x))


def _detached_input(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.first(x)
    return outer.last(outer.inner(hidden.detach()) + hidden)


def _second_input_joins_late(inner: Any, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    return _plain(inner, x) + skip.tanh() * inner.gate


def _two_inputs(outer: Any, x: torch.Tensor) -> torch.Tensor:
    return outer.last(outer.inner(outer.first(x), skip=x * outer.last.weight.sum()))


def _input_comes_out_as_it_is(inner: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, _plain(inner, x)


def _returned_input_is_used(outer: Any, x: torch.Tensor) -> torch.Tensor:
    same, hidden = outer.inner(outer.first(x))
    return outer.last(same + hidden)


def _only_the_returned_input_is_used(outer: Any, x: torch.Tensor) -> torch.Tensor:
    return outer.last(outer.inner(outer.first(x))[0])


def _input_is_not_used(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner.linear(torch.ones_like(x)) * inner.gate


def _in_place_on_the_input(inner: Any, x: torch.Tensor) -> torch.Tensor:
    x.mul_(inner.gate).relu_()
    return inner.linear(x)


def _in_place_on_part_of_the_input(inner: Any, x: torch.Tensor) -> torch.Tensor:
    x[:, 1:3] += inner.gate[:2]
    return inner.linear(x)


def _in_place_on_an_input_that_was_used(inner: Any, x: torch.Tensor) -> torch.Tensor:
    before = x + inner.gate
    x.mul_(inner.gate)
    return inner.linear(x) * before


def _in_place_without_gradients(inner: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x.clamp_(-0.5, 0.5)
    return _plain(inner, x)


def _nothing_but_in_place_on_the_input(inner: Any, x: torch.Tensor) -> None:
    x.mul_(inner.gate)
    x.add_(inner.linear(x.tanh()))


def _residual_in_place(inner: Any, x: torch.Tensor) -> torch.Tensor:
    x += inner.linear(x.tanh()) * inner.gate
    return x


def _in_place_beside_what_needs_none(inner: Any, x: torch.Tensor, mask: Any) -> torch.Tensor:
    x.mul_(mask).mul_(inner.gate)
    return inner.linear(x)


def _one_layer_after_another(outer: Any, x: torch.Tensor) -> torch.Tensor:
    return outer.last(outer.inner(outer.inner(outer.first(x))))


def _changed_input_is_used(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.first(x)
    return outer.last(outer.inner(hidden) * hidden)


def _only_the_changed_input_is_used(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.first(x)
    outer.inner(hidden)
    return outer.last(hidden)


def _input_is_part_of_something(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.cat([outer.first(x), x], dim=1)
    changed = outer.inner(hidden[:, 2:7])
    return outer.last(changed * hidden[:, :5])


def _input_and_mask(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.first(x)
    return outer.last(outer.inner(hidden, mask=x > 0) + hidden)


def _gradient_inside_forward(inner: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(inner.linear(point)).sum(), point)
    return _plain(inner, x) + slope


FORMS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., Any]]] = {
    "plain": (_simple, _plain),
    "in-place-on-the-output": (_in_place_on_the_output, _plain),
    "in-place-on-part-of-the-output": (_in_place_on_part_of_the_output, _plain),
    "in-place-on-a-view": (_in_place_on_the_output, _view),
    "in-place-on-part-of-a-view": (_in_place_on_part_of_the_output, _view),
    "containers": (_through_containers, _containers),
    "dataclass": (_through_a_dataclass, _dataclass),
    "unused-output": (_one_output_is_not_used, _two_outputs),
    "output-comes-back": (_one_output_comes_back_through_the_layer, _two_outputs),
    "input-without-gradient": (_input_without_gradient, _plain),
    "detached-input": (_detached_input, _plain),
    "two-inputs": (_two_inputs, _second_input_joins_late),
    "returned-input": (_returned_input_is_used, _input_comes_out_as_it_is),
    "only-the-returned-input": (_only_the_returned_input_is_used, _input_comes_out_as_it_is),
    "in-place-on-the-input": (_simple, _in_place_on_the_input),
    "in-place-on-part-of-the-input": (_simple, _in_place_on_part_of_the_input),
    "in-place-on-a-used-input": (_simple, _in_place_on_an_input_that_was_used),
    "in-place-without-gradients": (_simple, _in_place_without_gradients),
    "changed-input": (_changed_input_is_used, _in_place_on_the_input),
    "only-the-changed-input": (_only_the_changed_input_is_used, _in_place_on_the_input),
    "nothing-but-in-place": (_only_the_changed_input_is_used, _nothing_but_in_place_on_the_input),
    "in-place-on-a-part": (_input_is_part_of_something, _in_place_on_the_input),
    "residual-in-place": (_one_layer_after_another, _residual_in_place),
    "in-place-with-a-mask": (_input_and_mask, _in_place_beside_what_needs_none),
    "unused-input": (_simple, _input_is_not_used),
    "gradient-inside-forward": (_simple, _gradient_inside_forward),
}


def _model(form: str) -> Any:
    torch.manual_seed(21)
    return _outer(*FORMS[form]).double()


# What is near to another of them is in the matrix.
_NEAR = {
    "in-place-on-part-of-the-output",
    "in-place-on-a-view",
    "detached-input",
    "in-place-on-the-input",
    "in-place-on-part-of-the-input",
    "in-place-without-gradients",
    "in-place-on-a-part",
    "unused-input",
}


@pytest.mark.parametrize("form", few(FORMS, *(FORMS.keys() - _NEAR)))
@distributed(2)
def test_gradients_equal_the_unsharded_models(form: str, world_size: int) -> None:
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(22)).double()
    for reshard in (True, False):
        model, whole = _model(form), _model(form)
        for module in (model.first, model.inner, model):
            fully_shard(module, mesh=cpu_mesh(), reshard_after_forward=reshard)
        for step in range(2):
            model(x[my_rows()]).square().mean().backward()
            whole(x).square().mean().backward()
            allowed = rounding(world_size, steps=step + 1)
            what = f"gradients, step {step}, reshard_after_forward={reshard}"
            assert_equal(gradients_of(model), gradients_of(whole), allowed, what)
