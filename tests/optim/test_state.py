"""The state of optimizers onto other meshes, to the unsharded model and back; what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import Replicate

from fullshard.checkpoint import full_optim_state_dict, shard_full_optim_state_dict
from fullshard.optim import SOAP, AdamW8bit, Muon
from fullshard.sharding import fully_shard
from support.optim.given import assert_same
from support.optim.shapes import Shapes, gradients, groups_of
from support.optim.ways import WAYS, Way, full_state, full_values, give
from support.optim.wide import Wide, wide_gradients
from support.products import few
from support.ranks import cpu_mesh, distributed

Maker = Callable[[nn.Module], torch.optim.Optimizer]


def _muon(model: nn.Module) -> Muon:
    return Muon(groups_of(model), lr=0.02)


def _adamw8bit(model: nn.Module) -> AdamW8bit:
    return AdamW8bit(model.parameters(), lr=0.02)


def _soap(model: nn.Module) -> SOAP:
    return SOAP(groups_of(model, "soap"), lr=0.02, precondition_frequency=2, max_precond_dim=18)


MAKERS = [_muon, _adamw8bit, _soap]


def _start(way: Way | None, make: Maker) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Wide() if make is _adamw8bit else Shapes()
    if way is not None:
        way.apply(model)
    return model, make(model)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, way: Way | None, *steps: int) -> None:
    for step in steps:
        give(model, (wide_gradients if isinstance(model, Wide) else gradients)(step), way)
        optimizer.step()


def _assert_goes_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, way: Way | None, make: Maker
) -> None:
    """A run that was continued is the run that was never stopped."""
    whole, never_stopped = _start(None, make)
    _step(whole, never_stopped, None, 0, 1, 2, 3)
    _step(model, optimizer, way, 2, 3)
    assert_same(full_values(model), full_values(whole))
    assert_same(full_state(model, optimizer), full_state(whole, never_stopped))


def _take_values(model: nn.Module, way: Way | None, values: dict[str, torch.Tensor]) -> None:
    carrier = nn.Module()
    for name, value in values.items():
        carrier.register_parameter(name, nn.Parameter(value.clone()))
    if way is not None:
        way.apply(carrier)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(carrier.get_parameter(name))


@pytest.mark.cross
@pytest.mark.parametrize("make", few(MAKERS, _muon))
@pytest.mark.parametrize(
    ("before", "after"),
    few(
        [("four", "tensor parallel"), ("hybrid", "four"), ("tensor parallel", "hybrid")],
        ("four", "tensor parallel"),
        ("tensor parallel", "hybrid"),
        together=True,
    ),
)
@distributed(4)
def test_torchs_checkpoints_go_onto_another_mesh(
    before: str, after: str, make: Maker, tmp_path: Path
) -> None:
    model, optimizer = _start(WAYS[before], make)
    _step(model, optimizer, WAYS[before], 0, 1)
    values = full_values(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.save(get_optimizer_state_dict(model, optimizer, options=options), checkpoint_id=tmp_path)

    other, loaded = _start(WAYS[after], make)
    state = get_optimizer_state_dict(other, loaded, options=options)
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(other, loaded, state, options=options)
    _take_values(other, WAYS[after], values)
    _assert_goes_on(other, loaded, WAYS[after], make)


@pytest.mark.cross
@pytest.mark.parametrize("make", few(MAKERS, _muon, _adamw8bit))
@pytest.mark.parametrize("way", ["four", "tensor parallel", "hybrid"])
@distributed(4)
def test_our_functions_bring_it_to_the_unsharded_model_and_back(way: str, make: Maker) -> None:
    model, optimizer = _start(WAYS[way], make)
    _step(model, optimizer, WAYS[way], 0, 1)
    state = full_optim_state_dict(model, optimizer, rank0_only=False)
    values = full_values(model)

    whole, unsharded = _start(None, make)
    unsharded.load_state_dict(shard_full_optim_state_dict(state, whole, optim=unsharded))
    _take_values(whole, None, values)
    back = full_optim_state_dict(whole, unsharded, rank0_only=False)
    _assert_goes_on(whole, unsharded, None, make)

    other, again = _start(WAYS["four"], make)
    again.load_state_dict(shard_full_optim_state_dict(back, other, optim=again))
    _take_values(other, WAYS["four"], values)
    _assert_goes_on(other, again, WAYS["four"], make)


@pytest.mark.parametrize("make", few(MAKERS, _adamw8bit))
def test_a_state_dict_a_copy_and_a_pickle_go_on_as_the_run_itself(make: Maker) -> None:
    model, optimizer = _start(None, make)
    _step(model, optimizer, None, 0, 1)
    other, loaded = _start(None, make)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again, unpickled = pickle.loads(pickle.dumps((model, optimizer)))
    _assert_goes_on(other, loaded, None, make)
    _assert_goes_on(again, unpickled, None, make)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS)
def test_the_state_of_another_optimizer_is_refused_and_nothing_is_loaded(make: Maker) -> None:
    model, optimizer = _start(None, make)
    _step(model, optimizer, None, 0)
    before = copy.deepcopy(optimizer.state_dict())
    params = [group["params"] for group in optimizer.param_groups]
    other = torch.optim.RMSprop([{"params": each} for each in params])
    _step(model, other, None, 0)
    with pytest.raises(ValueError, match=r"another optimizer's.*load it into one of the class"):
        optimizer.load_state_dict(other.state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert_same(after["state"], before["state"])


@pytest.mark.parametrize("make", MAKERS)
@distributed(2)
def test_a_whole_state_is_refused_by_a_sharded_parameter_on_every_rank(make: Maker) -> None:
    whole, unsharded = _start(None, make)
    _step(whole, unsharded, None, 0)
    _, optimizer = _start(WAYS["two"], make)
    with pytest.raises(ValueError, match=r"of square is a plain tensor.*DTensor of shape"):
        optimizer.load_state_dict(unsharded.state_dict())
    assert not optimizer.state


@distributed(4)
def test_a_mesh_that_changed_under_a_state_is_an_error_before_anything_is_sent() -> None:
    model, optimizer = _start(WAYS["four"], _muon)
    _step(model, optimizer, WAYS["four"], 0)
    other, onto = _start(WAYS["hybrid"], _muon)
    with pytest.raises(ValueError, match=r"placed as \(Shard\(dim=0\),\).*fullshard.checkpoint"):
        onto.load_state_dict(optimizer.state_dict())
    _step(other, onto, WAYS["hybrid"], 0)
    before = full_values(other)
    old = model.get_parameter("wide")
    onto.state[other.get_parameter("wide")] = optimizer.state[old]
    with pytest.raises(RuntimeError, match=r"wide is a DTensor.*but its state 'momentum_buffer'"):
        _step(other, onto, WAYS["hybrid"], 1)
    assert_same(full_values(other), before)
    dist.barrier()


@distributed(2)
def test_a_gradient_that_is_cut_otherwise_is_an_error_before_anything_is_sent() -> None:
    model, optimizer = _start(WAYS["two"], _muon)
    give(model, gradients(0), WAYS["two"])
    grad: Any = model.get_parameter("tall").grad
    model.get_parameter("tall").grad = grad.redistribute(placements=[Replicate()])
    with pytest.raises(RuntimeError, match=r"tall is a DTensor.*but its gradient is"):
        optimizer.step()
    assert "momentum_buffer" not in optimizer.state[model.get_parameter("square")]


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "message"),
    [
        (Muon, (3,), torch.float32, r"Muon got .*shape \(3,\).*algorithm='adamw'.*matrix_groups"),
        (SOAP, (3,), torch.float32, r"SOAP got .*shape \(3,\).*algorithm='adamw'"),
        (Muon, (3, 2, 2, 2), torch.float32, r"of shape \(3, 2, 2, 2\)"),
        (Muon, (3, 3), torch.complex64, "complex64"),
        (AdamW8bit, (3, 3), torch.complex64, "complex64"),
    ],
)
def test_a_parameter_that_it_cannot_step_is_refused(
    kind: Any, shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind([torch.zeros(shape, dtype=dtype, requires_grad=True)])


@distributed(2)
def test_a_sharded_parameter_of_one_dim_is_refused_by_its_full_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    fully_shard(model, mesh=cpu_mesh())
    with pytest.raises(ValueError, match=r"Muon got 0.bias of shape \(3,\)"):
        Muon(model.parameters())


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Muon, {"lr": -1.0}, r"lr is -1.0; pass a finite number of at least 0"),
        (Muon, {"momentum": float("nan")}, r"momentum is nan"),
        (Muon, {"weight_decay": "0.1"}, r"weight_decay is '0.1'"),
        (Muon, {"ns_steps": 0}, r"ns_steps is 0; pass a whole number from 1 to 99"),
        (Muon, {"ns_coefficients": (1.0, 2.0)}, r"pass three numbers"),
        (Muon, {"adjust_lr_fn": "spectral"}, r"is 'spectral'; pass one of None, 'original'"),
        (Muon, {"algorithm": "sgd"}, r"algorithm is 'sgd'; pass one of 'muon', 'adamw'"),
        (Muon, {"split": 5}, r"split is 5.*has 6 indices along split_dim"),
        (Muon, {"split": (2, 3)}, r"adds up to 5.*has 6 indices"),
        (Muon, {"split": 2, "split_dim": 2}, r"split_dim is 2; pass one of 0, 1"),
        (Muon, {"algorithm": "adamw", "betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
        (SOAP, {"lr": -1.0}, r"lr is -1.0; pass a finite number of at least 0"),
        (SOAP, {"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
        (SOAP, {"shampoo_beta": 1.0}, r"shampoo_beta is 1.0; pass None, or a number"),
        (SOAP, {"precondition_frequency": 0}, r"precondition_frequency is 0; pass a whole number"),
        (SOAP, {"max_precond_dim": 0.5}, r"max_precond_dim is 0.5; pass a whole number"),
        (SOAP, {"algorithm": "muon"}, r"algorithm is 'muon'; pass one of 'soap', 'adamw'"),
        (SOAP, {"split": 5}, r"split is 5.*has 6 indices along split_dim"),
        (SOAP, {"split_dim": 2}, r"split_dim is 2; pass one of 0, 1"),
        (AdamW8bit, {"lr": -1.0}, r"lr is -1.0; pass a finite number of at least 0"),
        (AdamW8bit, {"betas": (0.9, 1.5)}, r"betas is \(0.9, 1.5\)"),
        (
            AdamW8bit,
            {"rounding": "up"},
            r"'up'; pass one of 'stochastic', 'residual', 'nearest'",
        ),
        (AdamW8bit, {"seed": -1}, r"seed is -1"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(
    kind: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind([torch.zeros(6, 3, requires_grad=True)], **options)


@distributed(2)
def test_options_that_no_longer_fit_soaps_state_are_an_error_before_anything_is_sent() -> None:
    model, optimizer = _start(WAYS["two"], _soap)
    _step(model, optimizer, WAYS["two"], 0)
    for group in optimizer.param_groups:
        group["max_precond_dim"] = 7
    before = full_values(model)
    with pytest.raises(RuntimeError, match=r"max_precond_dim cannot change while there is state"):
        _step(model, optimizer, WAYS["two"], 1)
    assert_same(full_values(model), before)
    dist.barrier()


@distributed(2)
def test_what_stands_for_soaps_state_is_no_state_of_another_optimizer() -> None:
    model, optimizer = _start(WAYS["two"], _soap)
    _step(model, optimizer, WAYS["two"], 0)
    other = _soap(model)
    other.state.update(optimizer.state)
    with pytest.raises(RuntimeError, match=r"square is a DTensor.*take its state from state_dict"):
        _step(model, other, WAYS["two"], 1)
    dist.barrier()


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients.*sparse"):
        Muon(table.parameters()).step()
