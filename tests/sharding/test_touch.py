"""A sharded parameter used where nothing gathers it: the error names module, parameter and cure."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fullshard.sharding import fully_shard, register_fsdp_forward_method, unsharded
from fullshard.sharding.params.sharded_access_errors import explain_touch
from support.events.models import DIM, batch, make_net
from support.events.recorder import ours
from support.modules import Assembled
from support.ranks import cpu_mesh, distributed
from support.surface.errors import says

CURES = ("fully_shard", "register_fsdp_forward_method", "unsharded(module)")


def leaves() -> Any:
    return Assembled(
        lambda m, x: m.norm(m.linear(x)),
        linear=nn.Linear(DIM, DIM),
        embedding=nn.Embedding(5, DIM),
        norm=nn.LayerNorm(DIM),
        convolution=nn.Conv1d(DIM, DIM, 1),
    )


@pytest.mark.parametrize("warm", [False, True], ids=["first", "after-a-step"])
@pytest.mark.parametrize("how", ["call", "forward"])
@distributed(2)
def test_a_layer_that_is_called_by_itself_says_what_is_sharded_and_what_to_do(
    how: str, warm: bool
) -> None:
    model = ours(leaves())
    if warm:
        model(batch()).sum().backward()
        model.reshard()
    inputs = {
        "linear": batch(),
        "embedding": torch.tensor([1, 2]),
        "norm": batch(),
        "convolution": torch.ones(1, DIM, 3),
    }
    for name, x in inputs.items():
        layer = model.get_submodule(name)
        call = layer if how == "call" else layer.forward
        words = (f"{name} ({type(layer).__name__})", f"{name}.weight", "sharded", *CURES)
        with pytest.raises(RuntimeError, match=says(*words)) as caught:
            call(x)
        assert "got mixed" in str(caught.value.__cause__)
    model(batch()).sum().backward()


@distributed(2)
def test_the_forward_of_a_sharded_block_called_without_its_hooks_names_the_layer_in_it() -> None:
    net = make_net(ours)
    net(batch())
    with pytest.raises(RuntimeError, match=says("blocks.1.up (Linear)", "blocks.1.up.bias")):
        net.blocks[1].forward(batch())


@pytest.mark.parametrize("method", [False, True], ids=["forward", "method"])
@distributed(2)
def test_a_parameter_of_another_module_used_in_a_forward_is_named(method: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, DIM)
            self.other = nn.Linear(DIM, DIM)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.linear(self.other(self.embedding(ids)), self.embedding.weight)

        def score(self, ids: torch.Tensor) -> torch.Tensor:
            return self.forward(ids)

    model: Any = Tied()
    ours(model.embedding)
    ours(model)
    register_fsdp_forward_method(model, "score")
    call = model.score if method else model
    with pytest.raises(RuntimeError, match=says("embedding.weight", *CURES)) as caught:
        call(torch.tensor([1, 2]))
    assert "other.weight" not in str(caught.value)
    model.reset_iter_state()


@distributed(2)
def test_errors_of_another_kind_stay_as_they_are() -> None:
    model = ours(leaves())
    error = RuntimeError("something else")
    for each in (error, ValueError("got mixed torch.Tensor and DTensor"), None):
        explain_touch(each)
    assert error.args == ("something else",)
    with pytest.raises(RuntimeError, match=r"same reduction dim|shapes cannot|dimension") as caught:
        model.linear(torch.ones(1))
    assert "register_fsdp_forward_method" not in str(caught.value)


# -- what must go on as before --------------------------------------------------------------------


@distributed(2)
def test_a_layer_may_be_given_a_dtensor() -> None:
    mesh = cpu_mesh()
    model = leaves()
    fully_shard(model, mesh=mesh)
    whole = copy.deepcopy(dict(model.state_dict()))
    x = torch.ones(2, DIM)
    got = model.linear(distribute_tensor(x, mesh, [Replicate()]))
    assert isinstance(got, DTensor)
    weight, bias = (whole[f"linear.{name}"].full_tensor() for name in ("weight", "bias"))
    torch.testing.assert_close(got.full_tensor(), F.linear(x, weight, bias))


@distributed(2)
def test_inside_forward_and_unsharded_blocks_layers_have_their_own_forward_again() -> None:
    model = ours(leaves())
    seen = []

    def look(module: nn.Module, args: Any) -> None:
        seen.append("forward" in module.__dict__)

    model.linear.register_forward_pre_hook(look)
    model(batch()).sum().backward()
    with unsharded(model):
        seen.append("forward" in model.linear.__dict__)
        model.linear(batch())
    assert seen == [False, False, False]
    assert "forward" in model.linear.__dict__, "sharded again"
    assert "forward" not in model.__dict__, "it gathers by itself"


@distributed(2)
def test_copies_on_the_cpu_may_be_called_layer_by_layer() -> None:
    net, whole = make_net(ours), make_net(None)
    with unsharded(net, offload_to_cpu=True):
        assert torch.equal(net.blocks[0].up(batch()), whole.blocks[0].up(batch()))


@distributed(2)
def test_a_forward_that_the_user_put_on_a_layer_is_kept_before_and_after() -> None:
    model: Any = leaves()
    before = model.linear.forward
    model.linear.forward = patched = lambda x: before(x) + 1
    wanted = model(batch()).detach()
    ours(model)
    torch.testing.assert_close(model(batch()).detach(), wanted)
    model.reshard()
    assert model.linear.forward is patched
    behind = model.norm.forward
    model.norm.forward = lambda x: behind(x) * 2  # while it is sharded
    with pytest.raises(RuntimeError, match=says("norm (LayerNorm)")):
        model.norm(batch())
    for _ in range(3):
        torch.testing.assert_close(model(batch()).detach(), 2 * wanted)
        model.reshard()


@distributed(2)
def test_a_layer_can_be_inspected_and_copied_while_it_is_sharded() -> None:
    model: Any = ours(leaves())
    assert list(inspect.signature(model.linear.forward).parameters) == ["input"]
    copied = copy.deepcopy(model.linear)
    x = distribute_tensor(torch.ones(2, DIM), cpu_mesh(), [Replicate()])
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
    assert not copied(x).full_tensor().any() and model.linear(x).full_tensor().any()
    optimizer = torch.optim.SGD(copied.parameters(), lr=1.0)
    copied(x).sum().backward()
    optimizer.step()  # which does not take them for the model's
    assert torch.equal(copied.bias.full_tensor(), torch.full((DIM,), -2.0))


@distributed(2)
def test_parameters_and_checkpoints_are_ordinary_dtensors() -> None:
    model: Any = ours(leaves())
    assert all(type(param) is DTensor for param in model.parameters())
    for saved in (dict(model.state_dict()), model.linear.weight):
        file = io.BytesIO()
        torch.save(saved, file)
        assert b"fullshard.sharding" not in file.getvalue()
