"""Whatever goes into a module's forward and comes out, gradients equal the unsharded model's.

What autograd sees of a sharded module is its inputs and outputs: these are the shapes they take.
Where torch's own can take a structure, its result is compared too, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree  # what libraries register with

from support.modules import Assembled
from support.parity.compare import EXACT, assert_equal, gradients_of, rounding
from support.parity.engines import OURS, TORCH, Engine
from support.parity.reference import my_rows
from support.products import few
from support.ranks import cpu_mesh, distributed

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    """What a library's models return."""

    loss: torch.Tensor
    extra: dict[str, Any]


class Holder:
    """A container that only torch's pytree knows."""

    def __init__(self, *held: Any) -> None:
        self.held = held


def _register() -> None:
    """Registers the container in this process, once."""
    if Holder not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            Holder, lambda found: (list(found.held), None), lambda items, context: Holder(*items)
        )


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A dict and a dataclass at once, as the outputs of model libraries are."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def _inner(run: Callable[..., Any]) -> Any:
    """A layer with a forward that the test chooses."""
    return Assembled(run, linear=nn.Linear(5, 5), gate=nn.Parameter(torch.randn(5)))


def _outer(run: Callable[..., torch.Tensor], inner: Callable[..., Any]) -> Any:
    """A model that calls the layer as the test chooses."""
    return Assembled(run, first=nn.Linear(5, 5), inner=_inner(inner), last=nn.Linear(5, 1))


def _plain(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner.linear(x) * inner.gate


def _linear(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner.linear(x)


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


# -- structures of libraries, outputs without gradient, one module twice ---------------------------


def _holder(inner: Any, holder: Holder) -> Holder:
    x, shift = holder.held
    return Holder(inner.linear(x).tanh(), [shift, {"x": inner.linear(shift)}])


def _through_a_holder(outer: Any, x: torch.Tensor) -> torch.Tensor:
    found = outer.inner(Holder(outer.first(x), x))
    return outer.last(found.held[0] + found.held[1][1]["x"])


def _output(inner: Any, x: torch.Tensor) -> ModelOutput:
    return ModelOutput(logits=inner.linear(x), hidden=(x, x.argmax(1)))


def _through_a_model_output(outer: Any, x: torch.Tensor) -> torch.Tensor:
    found = outer.inner(outer.first(x))
    assert type(found) is ModelOutput
    assert found.hidden[1].dtype is torch.int64
    return outer.last(found["logits"] + found.hidden[0])


def _deque(inner: Any, items: deque[torch.Tensor]) -> deque[torch.Tensor]:
    return deque([inner.linear(item) for item in items])


def _through_a_deque(outer: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = outer.inner(deque([outer.first(x), x]))
    return outer.last(first * second)


def _packed(inner: Any, packed: PackedSequence) -> PackedSequence:
    return packed._replace(data=inner.linear(packed.data))


def _through_a_packed_sequence(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.first(x).view(2, -1, 5)
    found = outer.inner(pack_padded_sequence(hidden, torch.tensor([2, 1]), batch_first=True))
    return outer.last(found.data)


def _some_without(inner: Any, x: torch.Tensor) -> Any:
    hidden = inner.linear(x)
    return {"out": hidden, "token": hidden.argmax(1), "seen": hidden.detach(), "size": 3}


def _through_some_without_gradient(outer: Any, x: torch.Tensor) -> torch.Tensor:
    found = outer.inner(outer.first(x))
    assert not found["seen"].requires_grad
    return outer.last(found["out"] * found["seen"].tanh() + found["token"][:, None])


def _none_needs_a_gradient(inner: Any, x: torch.Tensor) -> torch.Tensor:
    return inner.linear(x).detach()


def _past_an_output_without_gradient(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.first(x)
    return outer.last(hidden * outer.inner(hidden))


def _nothing(inner: Any, x: torch.Tensor) -> None:
    inner.linear(x)


def _past_no_output(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.first(x)
    assert outer.inner(hidden) is None
    return outer.last(hidden)


def _one_after_the_other(outer: Any, x: torch.Tensor) -> torch.Tensor:
    return outer.last(outer.inner(outer.inner(outer.first(x)).tanh()))


def _side_by_side(outer: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = outer.first(x)
    return outer.last(outer.inner(hidden) * outer.inner(hidden + 1))


def _once_without_gradient(outer: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = outer.inner(x)
    return outer.last(outer.inner(outer.first(x)) - target)


STRUCTURES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., Any]]] = {
    "registered": (_through_a_holder, _holder),
    "model-output": (_through_a_model_output, _output),
    "deque": (_through_a_deque, _deque),
    "packed-sequence": (_through_a_packed_sequence, _packed),
    "some-without-gradient": (_through_some_without_gradient, _some_without),
    "none-with-gradient": (_past_an_output_without_gradient, _none_needs_a_gradient),
    "no-output": (_past_no_output, _nothing),
    "twice-in-a-row": (_one_after_the_other, _linear),
    "twice-side-by-side": (_side_by_side, _linear),
    "once-without-gradient": (_once_without_gradient, _linear),
}
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
    **STRUCTURES,
}


def _sharded(form: str, engine: Engine, reshard: bool) -> Any:
    model = _model(form)
    for module in (model.first, model.inner, model):
        engine.fully_shard(module, mesh=cpu_mesh(), reshard_after_forward=reshard)
    return model


def _model(form: str) -> Any:
    _register()
    torch.manual_seed(21)
    return _outer(*FORMS[form]).double()


def _x() -> torch.Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(22)).double()


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
    "deque",
    "some-without-gradient",
    "twice-in-a-row",
}


@pytest.mark.parametrize("form", few(FORMS, *(FORMS.keys() - _NEAR)))
@distributed(2)
def test_gradients_equal_the_unsharded_models(form: str, world_size: int) -> None:
    """The definition is the mean of what each rank's rows give by themselves."""
    for reshard in (True, False):
        model, whole = _sharded(form, OURS, reshard), _model(form)
        for step in range(2):
            model(_x()[my_rows()]).square().mean().backward()
            for rank in range(world_size):
                rows = _x()[my_rows(rank, world_size)]
                (whole(rows).square().mean() / world_size).backward()
            allowed = rounding(world_size, steps=step + 1)
            what = f"gradients, step {step}, reshard_after_forward={reshard}"
            assert_equal(gradients_of(model), gradients_of(whole), allowed, what)


TORCH_LOOKS_NOT_INTO = {"registered", "deque"}  # and then computes with freed parameters
if torch.__version__ < "2.13":
    TORCH_LOOKS_NOT_INTO.add("model-output")
COMPARED = sorted(STRUCTURES.keys() - TORCH_LOOKS_NOT_INTO)
_FIRST = {"model-output", "packed-sequence", "once-without-gradient"} - TORCH_LOOKS_NOT_INTO


@pytest.mark.parametrize("form", few(COMPARED, *_FIRST))
@distributed(2)
def test_gradients_equal_those_under_torchs_own(form: str) -> None:
    gradients = []
    for engine in (OURS, TORCH):
        model = _sharded(form, engine, reshard=True)
        for _ in range(2):
            model(_x()[my_rows()]).square().mean().backward()
        gradients.append(gradients_of(model))
    assert_equal(gradients[0], gradients[1], EXACT, form)
