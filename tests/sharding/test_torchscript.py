"""Modules that ``torch.jit`` compiled, in sharded ones: traced ones train, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.sharding import full_state_dict, fully_shard, unsharded
from support.modules import in_turn
from support.parity.compare import full
from support.parity.engines import OURS, TORCH, Engine
from support.products import few
from support.ranks import distributed
from support.surface.errors import says
from support.surface.model import batch, train
from support.surface.ranks import full_parameters

# a DeprecationWarning, since torch 2.15 a FutureWarning
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

STEPS = range(4)  # enough for TorchScript to optimise what it runs


def _layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def _model(compiled: Callable[[nn.Module], Any] = lambda module: module) -> Any:
    torch.manual_seed(0)
    first, inner, last = nn.Linear(6, 6), _layers(), nn.Linear(6, 6)
    return in_turn(first=first, block=in_turn(inner=compiled(inner), after=last))


def _traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, batch())


@pytest.mark.cross
@pytest.mark.parametrize("reshard", few([True, False, None], True, None))
@pytest.mark.parametrize("units", [["block"], []], ids=["block", "root"])
@distributed(2)
def test_a_traced_module_in_a_sharded_one_trains_as_unsharded_and_as_under_torchs(
    units: list[str], reshard: bool | None
) -> None:
    reference = _model()
    wanted = train(reference, torch.optim.Adam(reference.parameters(), lr=0.1), STEPS)
    engines: list[Engine] = [OURS, TORCH]
    for engine in engines:
        model = _model(_traced)
        for name in units:
            engine.fully_shard(getattr(model, name), reshard_after_forward=reshard)
        engine.fully_shard(model, reshard_after_forward=reshard)
        got = train(model, torch.optim.Adam(model.parameters(), lr=0.1), STEPS)
        torch.testing.assert_close(got, wanted)
        assert list(model.state_dict()) == list(reference.state_dict())
        for name, value in full_parameters(model).items():
            torch.testing.assert_close(value, reference.get_parameter(name).detach())


@distributed(2)
def test_the_parameters_of_a_traced_module_are_saved_loaded_frozen_and_written_back() -> None:
    reference, model = _model(), fully_shard(_model(_traced))
    saved = full_state_dict(model, rank0_only=False)
    for name, value in reference.state_dict().items():
        assert torch.equal(saved[name], value), name
    with unsharded(model, writeback=True), torch.no_grad():
        for name, param in model.named_parameters():
            assert torch.equal(param, reference.get_parameter(name)), name
            param.mul_(2)
    for name, value in full_parameters(model).items():
        assert torch.equal(value, 2 * reference.get_parameter(name)), name
    model.load_state_dict(saved)
    model(batch()).sum().backward()
    reference(batch()).sum().backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(full(param.grad), reference.get_parameter(name).grad)
    model.zero_grad()
    model.get_parameter("block.inner.0.weight").requires_grad_(False)
    model(batch()).sum().backward()
    assert model.get_parameter("block.inner.0.weight").grad is None
    assert model.get_parameter("block.inner.2.weight").grad is not None


@distributed(2)
def test_what_takes_no_hooks_is_refused_by_name_and_stays_as_it_is() -> None:
    held = _model(torch.jit.script)
    before, inside = dict(held.named_parameters()), set(held.block.inner.parameters())
    with pytest.raises(ValueError, match=says("block.inner.0.weight", "torch.jit.script")):
        fully_shard(held)
    assert dict(held.named_parameters()) == before
    assert type(held) is nn.Sequential
    for compiled in (_traced(_layers()), torch.jit.script(_layers())):
        with pytest.raises(ValueError, match=says(type(compiled).__name__, "torch.jit compiled")):
            fully_shard(compiled)
    frozen = fully_shard(held, ignored_params=inside)
    assert torch.equal(frozen(batch()), _model()(batch()))


@distributed(2)
def test_a_scripted_module_without_parameters_changes_nothing() -> None:
    model = fully_shard(in_turn(first=nn.Linear(6, 6), after=torch.jit.script(nn.Tanh())))
    model(batch()).sum().backward()
    assert model.get_parameter("first.weight").grad is not None
