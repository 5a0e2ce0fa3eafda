"""Offload on one card: where things are between steps, what travels, and nobody reads early."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.policies import CPUOffloadPolicy
from fullshard.sharding import fully_shard
from support.wide.gpu import CARD, card, card_world, late, synchronisations
from support.wide.model import LEARNING_RATE, Stack, local, loss_of, make_batch, make_stack, shard

pytestmark = pytest.mark.gpu

STEPS = 4
COMBINATIONS = [(parameters, state) for parameters in (True, False) for state in (True, False)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    with card_world(tmp_path_factory.mktemp("world")) as mesh:
        yield mesh


def _policy(combination: tuple[bool, bool], *, pin_memory: bool = True) -> CPUOffloadPolicy:
    parameters, state = combination
    return CPUOffloadPolicy(pin_memory=pin_memory, parameters=parameters, optimizer_state=state)


def _sharded(mesh: DeviceMesh, policy: CPUOffloadPolicy) -> Stack:
    return shard(make_stack(), mesh=mesh, offload_policy=policy)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, *, micro: int = 1) -> list[float]:
    """Trains; each hand-over is made late, so that one who does not wait reads too early."""
    losses = []
    for step in range(STEPS):
        for part in range(micro):
            loss = loss_of(model, make_batch(8, step * micro + part).to(CARD))
            late()
            loss.backward()
        late()
        optimizer.step()
        late()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_every_combination_trains_as_the_unsharded_model(
    mesh: DeviceMesh, combination: tuple[bool, bool], pin_memory: bool
) -> None:
    model = _sharded(mesh, _policy(combination, pin_memory=pin_memory))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-3)
    whole = make_stack().to(CARD)
    other = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE, eps=1e-3)
    losses, expected = _steps(model, optimizer, micro=2), _steps(whole, other, micro=2)
    assert losses == pytest.approx(expected, rel=1e-4)
    for param, twin in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(local(param).cpu(), twin.detach().cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_everything_is_where_the_policy_says(
    mesh: DeviceMesh, combination: tuple[bool, bool]
) -> None:
    parameters, state = combination
    model = _sharded(mesh, _policy(combination))
    stepped: list[torch.device] = []

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            stepped.extend(local(each).device for each in self.param_groups[0]["params"])
            return super().step.__wrapped__(self, closure)  # type: ignore[attr-defined]  # without its hooks

    optimizer = Watched(model.parameters(), lr=LEARNING_RATE)
    loss_of(model, make_batch(8, 0).to(CARD)).backward()
    home = "cpu" if parameters else CARD.type
    for param in model.parameters():
        assert param.device.type == local(param).device.type == home
        assert local(param.grad).device.type == home
        if parameters:
            assert local(param).is_pinned()
            assert local(param.grad).is_pinned()
    optimizer.step()
    place = "cpu" if state else CARD.type
    assert {device.type for device in stepped} == {place}
    for param in model.parameters():
        assert param.device.type == home
        for key in ("exp_avg", "exp_avg_sq"):
            assert local(optimizer.state[param][key]).device.type == place


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_loaded_state_is_where_steps_are(
    mesh: DeviceMesh, combination: tuple[bool, bool]
) -> None:
    model = _sharded(mesh, _policy(combination))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    _steps(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    place = "cpu" if combination[1] else CARD.type
    for param in model.parameters():
        assert local(optimizer.state[param]["exp_avg"]).device.type == place
    _steps(model, optimizer)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("combination", [(True, False), (False, True)])
def test_fused_and_other_optimizers_step_elsewhere_alike(
    mesh: DeviceMesh, combination: tuple[bool, bool], fused: bool
) -> None:
    model = _sharded(mesh, _policy(combination))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=1e-3, fused=fused)
    whole = make_stack().to(CARD)
    other = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE, eps=1e-3)
    assert _steps(model, optimizer) == pytest.approx(_steps(whole, other), rel=1e-4)


def test_pinned_offload_makes_the_host_wait_once_in_a_backward(mesh: DeviceMesh) -> None:
    """For the stream that copies gradients to the host; never in a forward."""
    model = _sharded(mesh, CPUOffloadPolicy())
    batch = make_batch(8, 0).to(CARD)
    loss_of(model, batch).backward()  # plans
    model.zero_grad()
    card.synchronize()
    with synchronisations() as waits:
        loss = loss_of(model, batch)
    assert waits == []
    with synchronisations() as waits:
        loss.backward()
    assert len(waits) == 1


def test_shards_and_gradients_are_what_not_offloading_parameters_costs(
    mesh: DeviceMesh,
) -> None:
    used = []
    for parameters in (True, False):
        card.synchronize()
        gc.collect()  # or the first model counts as the second one's
        before = card.memory_allocated()
        model = _sharded(mesh, CPUOffloadPolicy(parameters=parameters))
        loss_of(model, make_batch(8, 0).to(CARD)).backward()
        card.synchronize()
        used.append(card.memory_allocated() - before)
        size = sum(local(param).nbytes for param in model.parameters())
        del model
    assert used[1] - used[0] >= 2 * size


def test_a_model_on_the_card_is_moved_home_and_one_moved_back_is_an_error(
    mesh: DeviceMesh,
) -> None:
    model = make_stack().to(CARD)
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    assert all(local(param).device.type == "cpu" for param in model.parameters())
    model.to(CARD)
    with pytest.raises(ValueError, match=r"move it with model\.to\('cpu'\)"):
        model(make_batch(8, 0).to(CARD))
