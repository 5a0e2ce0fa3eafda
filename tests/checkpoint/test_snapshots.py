"""State dicts that promise a copy: training that goes on does not change them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from fullshard.checkpoint import (
    OptimStateKind,
    OptimStateOptions,
    full_optim_state_dict,
    iter_full,
    optim_state_dict,
    set_optim_state_options,
    sharded_optim_state_dict,
    snapshot,
)
from fullshard.sharding import full_state_dict
from fullshard.sharding.base.tensors import tensors_in
from support.ranks import distributed
from support.surface.model import batch, build, sharded


def _kind(kind: OptimStateKind) -> Callable[..., Any]:
    def state_of(net: nn.Module, optimizer: Any) -> Any:
        set_optim_state_options(net, OptimStateOptions(kind=kind, offload_to_cpu=True))
        return optim_state_dict(net, optimizer)

    return state_of


COPIES: dict[str, Callable[..., Any]] = {
    "snapshot of the model and its optimizer": lambda net, o: snapshot(
        dict(zip(("model", "optimizer"), get_state_dict(net, o), strict=True))
    ),
    "snapshot of one module": lambda net, _: snapshot(net.state_dict()),
    "full, on rank 0": lambda net, _: full_state_dict(net),
    "full, on the CPU": lambda net, _: full_state_dict(net, rank0_only=False),
    "full, on the device": lambda net, _: full_state_dict(net, rank0_only=False, cpu_offload=False),
    "optimizer, full": full_optim_state_dict,
    "optimizer, in shards": sharded_optim_state_dict,
    **{f"optimizer, {kind.name}": _kind(kind) for kind in OptimStateKind},
    "a stream": lambda net, _: dict(iter_full(net)),
}


@pytest.mark.parametrize("door", COPIES)
@distributed(2, 1, matrix=[1])
def test_a_copy_stays_what_it_was_while_training_goes_on(door: str) -> None:
    net = build()
    whole = nn.Parameter(torch.ones(3))
    net.register_parameter("whole", whole)
    sharded(net, ignored_params={whole})
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1), foreach=False)
    _change(net, optimizer)
    state = COPIES[door](net, optimizer)
    held = list(map(_local, tensors_in(state)))
    before = copy.deepcopy(held)
    _change(net, optimizer)
    assert all(map(torch.equal, held, before))


def _change(net: Any, optimizer: Any) -> None:
    """Change all that training may change: parameters, a buffer, moments, a learning rate."""
    (net(batch()).square().mean() + net.whole.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    net.steps.add_(1)
    optimizer.param_groups[0]["lr"].mul_(0.5)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@distributed(2)
def test_a_snapshot_holds_the_same_tensors_cut_in_the_same_way() -> None:
    net = sharded(build())
    state = {"model": net.state_dict(), "counts": [1, (2, torch.ones(2))]}
    found: Any = snapshot(state)
    assert found["counts"][1][1].tolist() == [1, 1]
    for name, value in net.state_dict().items():
        assert torch.equal(_local(found["model"][name]), _local(value))
        if isinstance(value, DTensor):
            assert found["model"][name].placements == value.placements
            assert found["model"][name].device_mesh == value.device_mesh
