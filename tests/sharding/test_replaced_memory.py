"""Steps and gathers after the memory of a tensor was replaced and the tensor object stayed.

Each test compares with the unsharded model, trained on the whole batch, after the same changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard.sharding import fully_shard
from support.apart import apart
from support.parity.compare import assert_equal, parameters_of, rounding
from support.ranks import distributed

_Change = Callable[[torch.Tensor], None]
_Optimizer = optim.Optimizer


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() * 0.5


def _part(tensor: Any) -> torch.Tensor:
    """Return the local tensor of this rank."""
    local: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local


def _swap(tensor: torch.Tensor) -> None:
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.detach
    torch.utils.swap_tensors(tensor, kind(_halved(tensor)))


def _set_part(tensor: Any) -> None:
    if isinstance(tensor, DTensor):
        tensor._local_tensor = _halved(tensor._local_tensor)
    else:
        tensor.data = _halved(tensor)


def _set_data_of_part(tensor: torch.Tensor) -> None:
    part = _part(tensor)
    part.data = _halved(part)


@torch.no_grad()
def _set_storage_of_part(tensor: torch.Tensor) -> None:
    part: Any = _part(tensor)
    part.set_(_halved(part))


CHANGES: dict[str, _Change] = {
    "swap": _swap,
    "part": _set_part,
    "data of the part": _set_data_of_part,
    "storage of the part": _set_storage_of_part,
}

OPTIMIZERS: dict[str, Callable[[Any], _Optimizer]] = {
    "foreach": lambda params: optim.AdamW(params, lr=1e-2, eps=1e-2, foreach=True),
    "fused": lambda params: optim.AdamW(params, lr=1e-2, eps=1e-2, fused=True),
    "tensor lr": lambda params: optim.AdamW(params, lr=torch.tensor(1e-2), eps=1e-2, foreach=False),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "DTensor": lambda params: type("Own", (optim.SGD,), {})(params, lr=0.1, momentum=0.9),
}


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    layers = (nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    return nn.Sequential(*layers).double()


def _batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, generator=generator, dtype=torch.float64)


def _assert_trains_alike(
    make: Callable[[Any], _Optimizer],
    between_steps: Callable[[_Optimizer], object],
    before_the_step: Callable[[_Optimizer], object] = id,
    mesh: DeviceMesh | None = None,
) -> None:
    """Compare parameters after four steps, with changes before and after the second step."""
    whole, sharded = _net(), _net()
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    world_size = dist.get_world_size()
    for model in (sharded, whole):
        optimizer = make(model.parameters())
        for step in range(4):
            batch = _batch(step)
            mine = batch if model is whole else batch.chunk(world_size)[dist.get_rank()]
            model(mine).square().mean().backward()
            if step == 1:
                before_the_step(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                between_steps(optimizer)
    assert_equal(
        parameters_of(sharded), parameters_of(whole), rounding(world_size, steps=4), "parameters"
    )


def _tensors_in(optimizer: _Optimizer) -> list[torch.Tensor]:
    """Return tensors of the state, and options that are tensors."""
    places = [*optimizer.state.values(), *optimizer.param_groups]
    return [value for each in places for value in each.values() if isinstance(value, torch.Tensor)]


@pytest.mark.cross
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(2)
def test_of_a_state_or_an_option_the_next_step_uses_the_new_memory(name: str, change: str) -> None:
    def between(optimizer: _Optimizer) -> None:
        for tensor in _tensors_in(optimizer):
            CHANGES[change](tensor)

    _assert_trains_alike(OPTIMIZERS[name], between)


@pytest.mark.cross
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("memory", ["shared", "buckets"])
@distributed(2)
def test_of_a_parameter_the_next_step_and_the_next_forward_use_the_new_memory(
    memory: str, name: str, change: str
) -> None:
    def each(optimizer: _Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                CHANGES[change](param)

    with nullcontext() if memory == "shared" else apart() as mesh:
        _assert_trains_alike(OPTIMIZERS[name], each, each, mesh)


@pytest.mark.cross
@pytest.mark.parametrize("change", [each for each in CHANGES if each != "swap"])  # torch refuses it
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(2)
def test_of_a_gradient_the_step_uses_the_new_memory(name: str, change: str) -> None:
    def before(optimizer: _Optimizer) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                CHANGES[change](param.grad)

    _assert_trains_alike(OPTIMIZERS[name], id, before)


@distributed(2)
def test_after_data_of_a_state_was_set_a_step_is_an_error() -> None:
    model = _net()
    fully_shard(model)
    optimizer = OPTIMIZERS["foreach"](model.parameters())
    for _ in range(2):
        model(_batch(0)).sum().backward()
        optimizer.step()
    state: Any = optimizer.state[next(model.parameters())]
    state["exp_avg"].data = state["exp_avg"] * 0.5
    with pytest.raises(RuntimeError, match=r"^data of a state of AdamW was set"):
        optimizer.step()


def _load_half(optimizer: _Optimizer) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for values in saved["state"].values():
        values.update({key: value * 0.5 for key, value in values.items()})
    optimizer.load_state_dict(saved)


def _copy_groups_and_state(optimizer: _Optimizer) -> None:
    """Replace all containers by copies, and remove one parameter from its group."""
    optimizer.state = copy.copy(optimizer.state)
    optimizer.param_groups = [{**g, "params": list(g["params"])} for g in optimizer.param_groups]
    optimizer.param_groups[0]["params"].pop()


@pytest.mark.parametrize("change", [_load_half, _copy_groups_and_state])
@distributed(2)
def test_what_holds_parameters_and_state_may_be_replaced(change: Callable[..., None]) -> None:
    _assert_trains_alike(OPTIMIZERS["foreach"], change)
