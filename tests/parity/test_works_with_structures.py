"""Whatever structure autograd's tensors come in: registered containers, outputs without gradient.

Beside ``test_call_forms``: containers that libraries make their own, outputs of which some or all
need no gradient, and one module used twice. Right is the unsharded model; where torch's own can do
it, its result is compared too, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable
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


@dataclasses.dataclass
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


def _layer(run: Callable[..., Any]) -> Any:
    """A linear layer whose forward the test chooses."""
    return Assembled(
        lambda m, *args, **named: run(m.linear, *args, **named), linear=nn.Linear(5, 5)
    )


def _net(run: Callable[..., torch.Tensor], inner: Callable[..., Any]) -> Any:
    """Two layers, called as the test chooses, and a head."""
    first, second = _layer(lambda linear, x: linear(x)), _layer(inner)
    return Assembled(run, first=first, second=second, head=nn.Linear(5, 2))


def _holder(linear: nn.Linear, holder: Holder) -> Holder:
    x, shift = holder.held
    return Holder(linear(x).tanh(), [shift, {"x": linear(shift)}])


def _through_a_holder(net: Any, x: torch.Tensor) -> torch.Tensor:
    found = net.second(Holder(net.first(x), x))
    out: torch.Tensor = net.head(found.held[0] + found.held[1][1]["x"])
    return out


def _output(linear: nn.Linear, x: torch.Tensor) -> ModelOutput:
    return ModelOutput(logits=linear(x), hidden=(x, x.argmax(1)))


def _through_a_model_output(net: Any, x: torch.Tensor) -> torch.Tensor:
    found = net.second(net.first(x))
    assert type(found) is ModelOutput
    assert found.hidden[1].dtype is torch.int64
    out: torch.Tensor = net.head(found["logits"] + found.hidden[0])
    return out


def _deque(linear: nn.Linear, items: deque[torch.Tensor]) -> deque[torch.Tensor]:
    return deque([linear(item) for item in items])


def _through_a_deque(net: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = net.second(deque([net.first(x), x]))
    out: torch.Tensor = net.head(first * second)
    return out


def _packed(linear: nn.Linear, packed: PackedSequence) -> PackedSequence:
    return packed._replace(data=linear(packed.data))


def _through_a_packed_sequence(net: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = net.first(x).view(2, -1, 5)
    found = net.second(pack_padded_sequence(hidden, torch.tensor([2, 1]), batch_first=True))
    out: torch.Tensor = net.head(found.data)
    return out


def _some_without(linear: nn.Linear, x: torch.Tensor) -> Any:
    hidden = linear(x)
    return {"out": hidden, "token": hidden.argmax(1), "seen": hidden.detach(), "size": 3}


def _through_some_without_gradient(net: Any, x: torch.Tensor) -> torch.Tensor:
    found = net.second(net.first(x))
    assert not found["seen"].requires_grad
    out: torch.Tensor = net.head(found["out"] * found["seen"].tanh() + found["token"][:, None])
    return out


def _none_needs_a_gradient(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x).detach()


def _past_an_output_without_gradient(net: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = net.first(x)
    out: torch.Tensor = net.head(hidden * net.second(hidden))
    return out


def _nothing(linear: nn.Linear, x: torch.Tensor) -> None:
    linear(x)


def _past_no_output(net: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = net.first(x)
    assert net.second(hidden) is None
    out: torch.Tensor = net.head(hidden)
    return out


def _linear(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = linear(x)
    return out


def _one_after_the_other(net: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = net.head(net.second(net.second(net.first(x)).tanh()))
    return out


def _side_by_side(net: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = net.first(x)
    out: torch.Tensor = net.head(net.second(hidden) * net.second(hidden + 1))
    return out


def _once_without_gradient(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = net.second(x)
    out: torch.Tensor = net.head(net.second(net.first(x)) - target)
    return out


FORMS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., Any]]] = {
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


def _model(form: str) -> Any:
    _register()
    torch.manual_seed(61)
    return _net(*FORMS[form]).double()


def _sharded(form: str, engine: Engine, reshard: bool) -> Any:
    model = _model(form)
    for module in (model.first, model.second, model):
        engine.fully_shard(module, mesh=cpu_mesh(), reshard_after_forward=reshard)
    return model


def _x() -> torch.Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(62), dtype=torch.float64)


@pytest.mark.parametrize(
    "form",
    few(
        FORMS,
        "registered",
        "model-output",
        "packed-sequence",
        "none-with-gradient",
        "no-output",
        "twice-side-by-side",
        "once-without-gradient",
    ),
)
@distributed(2)
def test_gradients_equal_the_unsharded_models_on_each_ranks_rows(
    form: str, world_size: int
) -> None:
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


@pytest.mark.parametrize(
    "form",
    few(
        sorted(FORMS.keys() - TORCH_LOOKS_NOT_INTO),
        "model-output",
        "packed-sequence",
        "once-without-gradient",
    ),
)
@distributed(2)
def test_gradients_equal_those_under_torchs_own(form: str) -> None:
    gradients = []
    for engine in (OURS, TORCH):
        model = _sharded(form, engine, reshard=True)
        for _ in range(2):
            model(_x()[my_rows()]).square().mean().backward()
        gradients.append(gradients_of(model))
    assert_equal(gradients[0], gradients[1], EXACT, form)
