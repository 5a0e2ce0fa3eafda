"""Models built on the meta device: sharded there, materialised as shards, initialised, trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm import EventLog, observe
from fullshard.sharding import fully_shard
from support.ranks import distributed
from support.surface.model import Net, batch, build, sharded, train
from support.surface.ranks import assert_equal_state, everyone, full_parameters, never_gathered
from support.surface.ties import Tied


def _on_meta() -> Net:
    with torch.device("meta"):
        return Net()


@distributed(2)
def test_meta_parameters_at_the_first_forward_are_an_error_that_names_them_and_the_cure() -> None:
    net = sharded(_on_meta())
    log = EventLog()
    with observe(log), pytest.raises(ValueError) as caught:
        net(batch())
    message = str(caught.value)
    assert never_gathered(log)
    for name, _ in net.named_parameters():
        assert name in message
    assert "meta device" in message
    assert "to_empty(device=" in message
    assert everyone("in step") == ["in step"] * 2
    net.to_empty(device="cpu")
    net.load_state_dict(build().state_dict())
    assert torch.equal(net(batch()), build()(batch()))


@distributed(2)
def test_one_parameter_left_on_meta_is_the_only_one_named() -> None:
    net = build()
    net.head.bias = nn.Parameter(torch.zeros(3, device="meta"))
    net = sharded(net)
    with pytest.raises(ValueError, match=r"^head\.bias "):
        net(batch())


@distributed(1, 2, 4, matrix=[4])
def test_to_empty_and_a_full_state_dict_give_the_model_that_was_never_on_meta() -> None:
    reference, net = build(3), sharded(_on_meta())
    net.to_empty(device="cpu")
    net.load_state_dict(reference.state_dict())
    assert_equal_state(net.state_dict(), reference.state_dict())
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in (net, reference))
    torch.testing.assert_close(train(net, ours, range(3)), train(reference, theirs, range(3)))


@distributed(2, 4, matrix=[4])
def test_parameters_that_were_materialised_share_a_spec_with_their_gradients() -> None:
    """So norms and optimizers see at once, without comparing, that both are cut alike."""
    net = sharded(_on_meta()).to_empty(device="cpu")
    net.load_state_dict(build().state_dict())
    net(batch()).sum().backward()
    params: list[Any] = [param for param in net.parameters() if param.grad is not None]
    assert params
    assert all(param.grad._spec is param._spec for param in params)


@distributed(2, 4)
def test_each_rank_allocates_its_shard_only_once_it_leaves_the_meta_device() -> None:
    net = sharded(_on_meta())
    assert {tensor.device.type for tensor in (*net.parameters(), *net.buffers())} == {"meta"}
    for param in net.to_empty(device="cpu").parameters():
        assert isinstance(param, DTensor)
        local = param.to_local()
        assert local.device.type == "cpu"
        assert local.untyped_storage().nbytes() == local.numel() * 4


def _constant(param: torch.Tensor) -> None:
    nn.init.constant_(param, 0.25)


def _uniform(param: torch.Tensor) -> None:
    nn.init.uniform_(param, -0.5, 0.5)


def _normal(param: torch.Tensor) -> None:
    nn.init.trunc_normal_(param, std=0.02)


@pytest.mark.cross
@pytest.mark.parametrize(
    "initialise", [_constant, _uniform, _normal], ids=["constant", "uniform", "normal"]
)
@distributed(2, 4, matrix=[4])
def test_to_empty_and_nn_init_on_the_shards_then_train(
    initialise: Callable[[torch.Tensor], None],
) -> None:
    net = sharded(_on_meta()).to_empty(device="cpu")
    net.steps.zero_()
    torch.manual_seed(dist.get_rank())  # on the CPU a DTensor draws each shard from its rank's seed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="DTensor random operators")
        for param in net.parameters():
            initialise(param)
    reference = build()
    reference.load_state_dict(full_parameters(net) | {"steps": torch.zeros(())})
    if initialise is _constant:
        assert all(bool((param == 0.25).all()) for param in reference.parameters())
    else:
        rows = reference.stem.weight
        assert not torch.equal(rows[0], rows[-1])  # ranks drew different numbers
    ours, theirs = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in (net, reference))
    torch.testing.assert_close(train(net, ours, range(3)), train(reference, theirs, range(3)))


@pytest.mark.parametrize("apart", [False, True], ids=["one group", "two groups"])
@distributed(2)
def test_parameters_tied_on_meta_stay_tied(apart: bool) -> None:
    with torch.device("meta"):
        net: Any = Tied()
    if apart:
        fully_shard(net.embed)
    fully_shard(net)
    net.to_empty(device="cpu")
    torch.manual_seed(0)
    reference: Any = Tied()
    net.load_state_dict(reference.state_dict())
    tokens = torch.tensor([0, 1, 4])
    for model in (net, reference):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert net.head.weight is net.embed.weight
    assert [name for name, _ in net.named_parameters()] == [
        name for name, _ in reference.named_parameters()
    ]
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


@distributed(2)
def test_to_empty_keeps_attributes_and_requires_grad() -> None:
    net: Any = _on_meta()
    net.head.weight.kind = "decayed"
    net.stem.bias.requires_grad_(False)
    net = sharded(net).to_empty(device="cpu")
    net.load_state_dict(build().state_dict())
    net(batch()).sum().backward()
    assert net.head.weight.kind == "decayed"
    assert not net.stem.bias.requires_grad
    assert net.stem.bias.grad is None
    assert net.head.weight.grad is not None


@distributed(2)
def test_a_meta_model_loads_a_sharded_state_dict_with_assign() -> None:
    source, net = sharded(build(5)), sharded(_on_meta())
    net.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(net(batch()), source(batch()))


# -- buffers that are in no state dict ------------------------------------------------------------


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
        self.register_buffer("kept", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.inv_freq * self.kept


def _fill(module: nn.Module) -> None:
    module.get_buffer("inv_freq").fill_(1)


def _fill_data(module: nn.Module) -> None:
    data = module.get_buffer("inv_freq").data
    data.copy_(torch.where(data == 2, 1.0, 2.0))  # other values than the memory has by chance


def _assign(module: Any) -> None:
    module.inv_freq = torch.ones(4)


@pytest.mark.parametrize("write", [None, _fill, _fill_data, _assign])
@distributed(2)
def test_a_buffer_that_to_empty_left_unwritten_is_named_once(
    write: Callable[[Any], None] | None,
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(_Rotary(), nn.Linear(4, 4))
    for each in (model[0], model):
        fully_shard(each)
    model.to_empty(device="cpu")
    model.load_state_dict(nn.Sequential(_Rotary(), nn.Linear(4, 4)).state_dict())
    if write is not None:
        write(model[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 4))
        model(torch.ones(2, 4))
    found = [str(each.message) for each in caught if "to_empty" in str(each.message)]
    assert len(found) == (write is None)
    assert all(each.startswith("0.inv_freq: ") for each in found)
