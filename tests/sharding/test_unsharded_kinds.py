"""``unsharded`` and clipping where parameters are not ordinary: tensor parallel, 0-d, hooked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.policies import CPUOffloadPolicy
from fullshard.sharding import fully_shard, replicate, unsharded
from support.events.models import DIM, make_inputs, make_net
from support.gather_hooks import BFloat16Travel
from support.modules import Assembled
from support.parity.compare import assert_equal, rounding
from support.parity.models import CASES
from support.parity.models import build as build_case
from support.ranks import cpu_mesh, distributed, run_on_ranks
from support.surface.errors import says
from support.tp_model import batch, build, parallelize, shard

WAYS = pytest.mark.parametrize("cpu", [False, True], ids=["device", "cpu"])
RANKS = pytest.mark.parametrize("rank0", [False, True], ids=["all-ranks", "rank0"])


def add_one(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)


def assert_whole(model: nn.Module, wanted: nn.Module) -> None:
    """The sharded parameters say what ``wanted``'s do."""
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), name
        assert torch.equal(param.full_tensor(), wanted.get_parameter(name)), name


@pytest.mark.cross
@WAYS
@RANKS
@pytest.mark.parametrize("shape", [(2, 2), (1, 2, 2)])
@distributed(4)
def test_tensor_parallel_parameters_are_written_back(
    shape: tuple[int, ...], cpu: bool, rank0: bool
) -> None:
    names = ("dp", "tp") if len(shape) == 2 else ("replicate", "dp", "tp")
    mesh = cpu_mesh(shape, names)
    data = mesh["dp"] if len(shape) == 2 else mesh["replicate", "dp"]
    model: Any = shard(parallelize(build(7), mesh["tp"]), fully_shard, mesh=data)
    whole = build(7)
    place = data.get_coordinate()  # each tensor parallel rank has a first one of its own
    with unsharded(model, writeback=True, rank0_only=rank0, offload_to_cpu=cpu):
        weight = model.blocks[0].up.weight
        if not rank0 or not any(place or ()):
            assert isinstance(weight, DTensor) is not cpu
            assert weight.shape == whole.blocks[0].up.weight.shape
            add_one(model)
    add_one(whole)
    assert_whole(model, whole)
    got, want = model(batch(0)), whole(batch(0))
    assert_equal({"output": got.detach()}, {"output": want.detach()}, rounding(4), "output")


def _scaled() -> Any:
    """A 0-d parameter beside an ordinary one."""
    gain, weight = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3, DIM))
    return Assembled(lambda m, x: m.gain * (x @ m.weight.t()), gain=gain, weight=weight)


def _on_mesh(shape: tuple[int, int], model: nn.Module) -> Any:
    return fully_shard(model, mesh=cpu_mesh(shape, ("replicate", "shard")))


def _offloaded(model: nn.Module) -> Any:
    return fully_shard(model, mesh=cpu_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def _case(name: str) -> tuple[int, Callable[[], Any], Callable[[Any], Any]]:
    """A model of the parity tests, with parameters of the dtypes that it has."""

    def shard_it(model: Any) -> Any:
        for unit in CASES[name].units_of(model):
            fully_shard(unit, mesh=cpu_mesh())
        return fully_shard(model, mesh=cpu_mesh())

    return 2, partial(build_case, CASES[name], None), shard_it


NET = partial(make_net, None)
KINDS: dict[str, tuple[int, Callable[[], Any], Callable[[Any], Any]]] = {
    "a 0-d parameter": (2, _scaled, lambda model: fully_shard(model, mesh=cpu_mesh())),
    "replicated": (2, NET, lambda model: replicate(model, mesh=cpu_mesh())),
    "offloaded": (2, NET, _offloaded),
    "hybrid": (4, NET, partial(_on_mesh, (2, 2))),
    "a world of one": (2, NET, partial(_on_mesh, (2, 1))),
    **{name: _case(name) for name in ("empty", "tied-across-groups", "many-dtypes")},
}


@WAYS
@RANKS
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_each_kind_are_written_back_on_every_rank(
    kind: str, cpu: bool, rank0: bool
) -> None:
    ranks, make, shard_it = KINDS[kind]

    def body() -> None:
        model, whole = shard_it(make()), make()
        with unsharded(model, writeback=True, rank0_only=rank0, offload_to_cpu=cpu):
            if not rank0 or dist.get_rank() == 0:
                for name, param in model.named_parameters():
                    assert torch.equal(param, whole.get_parameter(name)), name
                add_one(model)
        add_one(whole)
        assert_whole(model, whole)
        if kind not in CASES:
            inputs = make_inputs(dist.get_rank())
            assert torch.equal(model(inputs), whole(inputs))

    run_on_ranks(body, ranks)


@distributed(2)
def test_parameters_with_gather_hooks_are_shown_and_not_written_back() -> None:
    model: Any = nn.Linear(DIM, 4)
    whole = model.weight.detach().clone()
    model.weight = nn.Parameter(BFloat16Travel(whole.clone()))
    fully_shard(model, mesh=cpu_mesh())
    with unsharded(model):
        assert torch.equal(model.weight, whole.bfloat16().float())
    with (
        pytest.raises(RuntimeError, match=says("weight", "fsdp_post_all_gather", "offload_to_cpu")),
        unsharded(model, writeback=True),
    ):
        raise AssertionError("the block is not reached")
    assert isinstance(model.weight, DTensor)
