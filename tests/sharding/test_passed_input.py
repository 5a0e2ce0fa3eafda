"""What a sharded module is given is what it would be given unsharded: it may be changed in place.

And backward is past the module when it is past that input, whatever else the module was given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.comm import EventLog, observe
from fullshard.sharding.base.states import ShardedState
from support.events.models import DIM, batch, make_net
from support.events.recorder import (
    assert_all_returned,
    assert_gradients_of,
    full_gradients,
    group_of,
    lifecycle,
    ours,
    record,
)
from support.modules import Assembled
from support.ranks import distributed


class Scale(torch.autograd.Function):
    """``x`` times ``scale``, in place; ``look`` is called when backward comes for it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, look: Callable[[], None]
    ) -> torch.Tensor:
        ctx.save_for_backward(x.clone(), scale)
        ctx.mark_dirty(x)
        ctx.look = look
        return x.mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, scale = ctx.saved_tensors
        ctx.look()
        return grad * scale, (grad * x).sum(0), None


def _scale(module: Any, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
    function: Any = Scale
    scaled: torch.Tensor = module.layer(function.apply(x, module.scale, module.look))
    return scaled if other is None else scaled + other


def scaling() -> Any:
    """A layer that scales its input in place before it uses it."""
    scale = nn.Parameter(torch.rand(DIM))
    return Assembled(_scale, scale=scale, layer=nn.Linear(DIM, DIM), look=lambda: None)


def scaling_chain(shard: Callable[..., Any] | None, **arguments: Any) -> Any:
    """Three layers of which the second scales its input in place, each sharded by itself."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(DIM, DIM), scaling(), nn.Linear(DIM, DIM))
    if shard is not None:
        for part in (*model, model):
            shard(part, **arguments)
    return model


def use_only_the_changed_input(model: Any) -> torch.Tensor:
    """A loss that backward reaches the second layer's scale from, but not its output."""
    hidden = model[0](batch())
    model[1](hidden)
    return model[2](hidden).square().sum()


# -- changed in place -----------------------------------------------------------------------------


@distributed(2)
def test_the_parameters_are_there_when_backward_reaches_only_what_was_changed_in_place() -> None:
    model, whole, seen = scaling_chain(ours), scaling_chain(None), []
    model(batch())  # finds the root
    model.reshard()
    model[2].set_modules_to_backward_prefetch([model[2]])  # nothing but itself, else it hides it
    model[1].look = lambda: seen.append(group_of(model[1]).state)
    use_only_the_changed_input(model).backward()
    assert seen == [ShardedState.UNSHARDED]
    use_only_the_changed_input(whole).backward()
    assert_gradients_of(model, whole)


@pytest.mark.parametrize("given", ["alone", "with another"])
@distributed(2)
def test_an_input_that_requires_a_gradient_only_afterwards_is_watched(given: str) -> None:
    model = scaling()
    whole = scaling()
    seen: list[ShardedState] = []
    whole.load_state_dict(model.state_dict())
    ours(model)
    model(batch())
    model.reshard()  # a root stays gathered for its backward
    model.look = lambda: seen.append(group_of(model).state)
    for each in (model, whole):
        x = batch()
        each(x) if given == "alone" else each(x, other=batch(requires_grad=True))
        assert x.requires_grad
        if each is model:
            model.reshard()
        x.square().sum().backward()
    assert seen == [ShardedState.UNSHARDED]
    assert_gradients_of(model, whole)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_the_end_of_backward_ends_a_module_that_changed_its_input(reshard: bool) -> None:
    model, whole = scaling_chain(ours, reshard_after_forward=reshard), scaling_chain(None)
    recorder, log = record(model), EventLog()
    for _ in range(2):
        recorder.clear()
        loss = model(batch(requires_grad=True)).square().sum()
        with observe(log):
            loss.backward()
        assert sorted(recorder.reductions) == ["0", "1", "2"]
        assert_all_returned(model)
        whole(batch(requires_grad=True)).square().sum().backward()
    assert_gradients_of(model, whole)
    events = lifecycle(log)
    ends = [events.index(f"post_backward {name}") for name in "201"]
    assert ends == sorted(ends), "the layer below ended first: only the end of backward ends it"


@distributed(2)
def test_a_graph_with_a_changed_input_that_is_dropped_holds_nothing() -> None:
    model = scaling_chain(ours, reshard_after_forward=False)
    output = model(batch(requires_grad=True))
    assert group_of(model[1]).state is ShardedState.UNSHARDED
    del output
    assert_all_returned(model)


@distributed(2)
def test_what_the_caller_gave_is_changed_as_without_sharding() -> None:
    model, whole = scaling_chain(ours), scaling_chain(None)
    given = []
    for each in (model, whole):
        hidden = batch(requires_grad=True) * 1
        each[1](hidden)
        given.append(hidden)
    assert torch.equal(*given) and not torch.equal(given[0], batch())
    for each in (model, whole):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            each[1](batch(requires_grad=True))
    model.reset_iter_state()


@distributed(2)
def test_a_leaf_may_be_changed_without_gradients() -> None:
    class Clamping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x.clamp_(-0.5, 0.5)
            return super().forward(x)

    torch.manual_seed(5)
    whole = Clamping(DIM, DIM)
    layer = ours(copy.deepcopy(whole))
    leaves = [batch(requires_grad=True), batch(requires_grad=True)]
    for each, leaf in zip((layer, whole), leaves, strict=True):
        each(leaf).square().sum().backward()
    assert torch.equal(*leaves)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    assert_gradients_of(layer, whole)


# -- passed ---------------------------------------------------------------------------------------


def adding() -> Any:
    """A layer of one input, and a term that may be given too."""
    return Assembled(lambda m, x, more=0: m.layer(x) + more, layer=nn.Linear(DIM, DIM))


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "positional": lambda layer, x: layer(x),
    "keyword": lambda layer, x: layer(x=x),
    "with a mask": lambda layer, x: layer(x, more=torch.ones(DIM)),
    "the same twice": lambda layer, x: layer(x, x),
    "two": lambda layer, x: layer(x, more=x.tanh()),
    "a parameter": lambda layer, x: layer(nn.Parameter(x.detach())) + 0 * x,
}


@pytest.mark.parametrize("call", CALLS)
@distributed(2)
def test_however_the_input_is_given_backward_ends_the_module_before_it_goes_on_below(
    call: str,
) -> None:
    torch.manual_seed(4)
    whole = adding()
    layer = ours(copy.deepcopy(whole))
    leaves: list[torch.Tensor] = []
    seen: list[ShardedState] = []
    CALLS[call](layer, batch())  # finds the root
    for each in (layer, whole):
        leaves.append(batch(requires_grad=True))
        x = leaves[-1] * 2
        assert x.grad_fn is not None
        if each is layer:
            x.grad_fn.register_prehook(lambda grads: seen.append(group_of(layer).state))
        CALLS[call](each, x).square().sum().backward()
    if call != "a parameter":  # of which no gradient goes on
        assert seen == [ShardedState.SHARDED]
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    assert_gradients_of(layer, whole)


@distributed(2)
def test_an_input_that_gets_no_gradient_gets_none() -> None:
    class Swallow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    def run(model: Any, x: torch.Tensor) -> Any:
        function: Any = Swallow
        return model.layer(torch.ones_like(x)) + function.apply(x)

    layer, x = ours(Assembled(run, layer=nn.Linear(DIM, DIM))), batch(requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is None
    assert_all_returned(layer)


@distributed(2)
def test_an_input_made_in_inference_mode_is_passed_too() -> None:

    layer = ours(Assembled(lambda m, x: x + m.shift, shift=nn.Parameter(torch.ones(DIM))))
    with torch.inference_mode():
        x = batch().requires_grad_()
    layer(x).sum().backward()
    (gradient,) = full_gradients(layer).values()
    torch.testing.assert_close(gradient, torch.full((DIM,), 4.0))
    assert_all_returned(layer)


# -- hooks on the output --------------------------------------------------------------------------


@distributed(2)
def test_a_hook_on_the_output_finds_the_parameters_and_may_change_the_gradient() -> None:
    net, whole = make_net(ours), make_net(None)
    for each in (net, whole):

        def add_decay(grad: torch.Tensor, each: Any = each) -> torch.Tensor:
            return grad + each.blocks[1].down.bias.detach()

        def watch(module: Any, args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda grad: grad * 100).remove()
            output.register_hook(add_decay)

        each.blocks[1].register_forward_hook(watch)
        each(batch()).square().sum().backward()
    assert_gradients_of(net, whole)
