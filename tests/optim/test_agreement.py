"""Ranks agree on a step before anything is sent: a rank that differs makes all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fullshard.optim import SOAP, AdamW8bit, Muon
from fullshard.sharding import RankMismatchError, fully_shard
from support.optim.given import assert_same
from support.optim.shapes import Shapes, gradients, groups_of
from support.optim.ways import WAYS, Way, full_state, full_values, give
from support.optim.wide import Wide, wide_gradients
from support.ranks import distributed
from support.threads.ranks import ThreadRank, ThreadsFailed
from support.threads.world import run_program_on_threads

Maker = Callable[[nn.Module], torch.optim.Optimizer]


def _muon(model: nn.Module) -> Muon:
    return Muon(groups_of(model))


def _soap(model: nn.Module) -> SOAP:
    return SOAP(groups_of(model, "soap"), precondition_frequency=1)


def _adamw8bit(model: nn.Module) -> AdamW8bit:
    return AdamW8bit(model.parameters())


MAKERS = [_adamw8bit, _muon, _soap]
COLUMNS = WAYS["columns"]  # there 8-bit AdamW exchanges, too


def _failed(
    make: Maker,
    spoil: Callable[[nn.Module, torch.optim.Optimizer], None],
    way: Way = COLUMNS,
    *,
    has_state: bool = True,
) -> str:
    """What all ranks say when rank 1 is spoilt after two steps; nothing was changed by then.

    ``has_state``: there is state to compare after ``spoil``.
    """

    def body(rank: ThreadRank) -> None:
        model = Wide() if make is _adamw8bit else Shapes()
        whole = wide_gradients if make is _adamw8bit else gradients
        way.apply(model)
        optimizer = make(model)
        for step in range(2):
            give(model, whole(step), way)
            optimizer.step()
        before, state = full_values(model), full_state(model, optimizer)
        give(model, whole(2), way)
        if rank.rank == 1:
            spoil(model, optimizer)
        try:
            optimizer.step()
        except RankMismatchError as error:
            assert_same(full_values(model), before)
            if has_state:
                assert_same(full_state(model, optimizer), state)
            raise error from None

    with pytest.raises(ThreadsFailed) as caught:
        run_program_on_threads(body, way.world_size)
    errors = caught.value.errors
    assert {type(error) for error in errors.values()} == {RankMismatchError}
    assert len(errors) == way.world_size and len({str(error) for error in errors.values()}) == 1
    return str(errors[0])


@pytest.mark.cross
@pytest.mark.parametrize("name", ["square", "bias", "few"])
@pytest.mark.parametrize("way", ["two", "columns", "copies"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_gradient_that_one_rank_drops_in_a_later_step_is_an_error_on_all(
    make: Maker, way: str, name: str
) -> None:
    """Also of what no step exchanges: the other ranks' parts would leave this rank's behind."""

    def drop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.get_parameter(name).grad = None

    said = _failed(make, drop, WAYS[way])
    assert "ranks disagree on what an optimizer is to step" in said
    assert f"rank 0 has {name} of shape" in said
    assert "with gradients of the same ones" in said


@pytest.mark.parametrize("way", ["columns", "two"])
@pytest.mark.parametrize("make", MAKERS)
def test_ranks_without_any_gradient_but_one_raise_too(make: Maker, way: str) -> None:
    def drop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    assert "rank 1 has nothing more" in _failed(make, drop, WAYS[way])


@pytest.mark.parametrize("make", MAKERS)
def test_an_error_that_one_rank_finds_is_told_to_all(make: Maker) -> None:
    def spoil(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        param: Any = model.get_parameter("bias")
        whole = torch.zeros(param.shape)
        param.grad = DTensor.from_local(whole, param.device_mesh, [Replicate()], run_check=False)

    said = _failed(make, spoil)
    assert "some ranks found an error; rank 1: bias is a DTensor" in said


def test_a_state_of_soap_that_one_rank_alone_loads_is_an_error_on_all() -> None:
    """Its owners would wait for what the others do not send."""

    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state.clear()

    assert "load its state on all ranks or on none" in _failed(_soap, load, has_state=False)


@distributed(4)
def test_ranks_of_two_meshes_tell_those_of_the_second_what_the_first_found() -> None:
    """Rank 3 shares no mesh with rank 0, whose gradient is missing."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = nn.ModuleDict({"one": nn.Linear(4, 4, bias=False), "two": nn.Linear(4, 4, bias=False)})
    fully_shard(model["one"], mesh=mesh["a"])
    fully_shard(model["two"], mesh=mesh["b"])
    optimizer = Muon(model.parameters())
    for step in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        if step == 1 and dist.get_rank() == 0:
            model["one"].weight.grad = None
        if step == 0:
            optimizer.step()
        else:
            with pytest.raises(RankMismatchError, match="rank 0 has nothing more; rank 2"):
                optimizer.step()
    dist.barrier()
