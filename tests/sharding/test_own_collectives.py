"""The collectives of ``docs/how-to/own-collective.md``, as they stand there, in ``fully_shard``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor

from fullshard.comm import EventKind, EventLog, observe
from fullshard.sharding import fully_shard
from support.collectives import ToldAllGather, ToldReduceScatter
from support.modules import Branches
from support.ranks import cpu_mesh, distributed
from support.wide.model import Stack, loss_of, make_batch, make_stack
from support.wide.page import OWN_COLLECTIVE, run_page

STEPS = 2


def _shard(apply: Callable[..., Any], model: Stack) -> Stack:
    for block in model.blocks:
        apply(block, mesh=cpu_mesh())
    apply(model, mesh=cpu_mesh())
    return model


def _part(step: int) -> torch.Tensor:
    world_size = dist.get_world_size()
    return make_batch(world_size, step).chunk(world_size)[dist.get_rank()]


def _train(model: Stack) -> list[torch.Tensor]:
    """The full gradients of the first step, then the full parameters after the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    for step in range(STEPS):
        loss_of(model, _part(step)).backward()
        if step == 0:
            seen += [_full(param.grad) for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [_full(param) for param in model.parameters()]


def _full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


@distributed(2, 4, matrix=[4])
def test_the_counter_sees_every_gather_of_a_step(world_size: int) -> None:
    defined = run_page(OWN_COLLECTIVE)
    counter, log = defined["CountingAllGather"](), EventLog()
    model = _shard(fully_shard, make_stack(blocks=3))
    defined["use_collectives"](model, counter)
    with observe(log):
        loss_of(model, _part(0)).backward()
    gathers = log.of(EventKind.ALL_GATHER)
    assert len(gathers) == 4 + 3  # the root's own parameters stay until backward
    assert counter.received == sum(each.nbytes for each in gathers) * (world_size - 1) // world_size


@pytest.mark.cross
@pytest.mark.parametrize("name", ["HalfTrafficReduceScatter", "AllReduceScatter"])
@distributed(2, 4, matrix=[4])
def test_marks_survive_a_reduction_of_ones_own(name: str, world_size: int) -> None:
    """What one rank used has a gradient on all; what none used has none."""
    defined = run_page(OWN_COLLECTIVE)
    model = Branches(3, 5)
    fully_shard(model, mesh=cpu_mesh())
    defined["use_collectives"](model, None, defined[name]())
    model(torch.ones(2, 3), left=dist.get_rank() == 0).sum().backward()
    for part, used in ((model.left, 1), (model.right, world_size - 1)):
        # Each of a rank's two rows adds 1 per output; the mean is over ranks.
        torch.testing.assert_close(_full(part.bias.grad), torch.full((5,), 2 * used / world_size))
    assert model.unused.weight.grad is None
    assert model.unused.bias.grad is None


@distributed(2, 4, matrix=[4])
def test_classes_written_for_torch_serve_torchs_fully_shard_and_ours_alike() -> None:
    defined = run_page(OWN_COLLECTIVE)
    ours = _shard(fully_shard, make_stack())
    theirs = _shard(torch_fsdp.fully_shard, copy.deepcopy(make_stack()))
    plain = _train(_shard(fully_shard, make_stack()))
    for model in (ours, theirs):
        for module in model.modules():
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(defined["ListAllGather"]())  # type: ignore[operator]
                module.set_custom_reduce_scatter(  # type: ignore[operator]
                    defined["AllReduceScatter"]()
                )
            if isinstance(module, torch_fsdp.FSDPModule):
                # Asks for a sum and divides by itself: not every torch averages over gloo.
                module.set_force_sum_reduction_for_comms(True)
    results = zip(_train(ours), _train(theirs), plain, strict=True)
    for mine, torchs, default in results:
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine, default, rtol=1e-5, atol=1e-7)


@distributed(2)
def test_only_the_module_that_was_told_uses_a_collective() -> None:
    model: Any = _shard(fully_shard, make_stack())
    told: list[str] = []
    for name, module in (("block", model.blocks[1]), ("root", model)):
        gather = ToldAllGather(lambda *_, name=name: told.append(f"gather {name}"))
        reduce = ToldReduceScatter(lambda *_, name=name: told.append(f"reduce {name}"))
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
    loss_of(model, _part(0)).backward()
    assert told == ["gather root", "gather block", "gather block", "reduce block", "reduce root"]
