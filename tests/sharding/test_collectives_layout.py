"""Ranks cannot diverge: one layout, whoever used what, and whenever a graph dies (DESIGN 3.4).

When a graph dies is a rank's own affair: one may keep an output in a list, or in an exception that
waits for the garbage collector.
"""

from __future__ import annotations

import gc
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.sharding.base.forward_pass import ForwardPass
from support.events.models import DIM, batch, make_net
from support.events.recorder import (
    Shard,
    assert_all_returned,
    assert_gradients_of,
    full_gradients,
    ours,
    record,
)
from support.modules import Assembled
from support.ranks import distributed
from support.surface.ranks import everyone

# -- in which layout ------------------------------------------------------------------------------


def _choose(model: Any, x: torch.Tensor, used: list[int]) -> torch.Tensor:
    for index in used:
        x = torch.tanh(model.parts[index](x))
    out: torch.Tensor = model.after(x)
    return out


def chooses() -> Any:
    """Three linears in one group, of which a forward uses those that it is told to."""
    parts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
    return Assembled(_choose, parts=parts, after=nn.Linear(DIM, DIM))


def make_chooses(shard: Shard | None) -> Any:
    """It inside a sequence, so that it is a group of its own."""
    torch.manual_seed(0)
    model = chooses()
    return model if shard is None else shard(model)


def reduced_numels(used: list[int]) -> list[int]:
    """What a backward through ``used`` gives to its reductions."""
    model = make_chooses(ours)
    recorder = record(model)
    model(batch(), used).sum().backward()
    return recorder.reduced_numels


@distributed(2, 4, matrix=[4])
def test_the_size_of_a_reduction_does_not_depend_on_which_parameters_have_a_gradient() -> None:
    sizes = [reduced_numels(used) for used in ([0, 1, 2], [1], [], [2, 2])]
    assert len(sizes[0]) == 1 and all(each == sizes[0] for each in sizes)


@distributed(2, 4)
def test_ranks_that_use_different_parameters_issue_the_same_collectives() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    used = [index for index in range(3) if index % world == rank]
    model, plain = make_chooses(ours), make_chooses(None)
    recorder = record(model)
    for _ in range(2):
        model(batch(), used).sum().backward()
        plain(batch(), used).sum().backward()
    calls = [call for call in recorder.calls if not call.startswith("wait")]
    found = everyone((calls, recorder.reduced_numels))
    assert all(each == found[0] for each in found)
    assert_gradients_of(model, plain)


@distributed(2, 4)
def test_a_parameter_that_no_rank_used_keeps_no_gradient_and_one_that_any_used_gets_one() -> None:
    rank = dist.get_rank()
    model = make_chooses(ours)
    model(batch(), [0] if rank == 0 else []).sum().backward()
    gradients = full_gradients(model)
    present = {name.rpartition(".")[0] for name, grad in gradients.items() if grad is not None}
    assert present == {"parts.0", "after"}
    for name, param in model.named_parameters():
        assert (param.grad is None) == (name.rpartition(".")[0] not in present), "on every rank"


@distributed(2)
def test_what_was_accumulated_stays_when_a_backward_leaves_a_parameter_unused() -> None:
    model = make_chooses(ours)
    model(batch(), [0, 1]).sum().backward()
    before = full_gradients(model)["parts.1.weight"]
    assert before is not None
    before = before.clone()
    model(batch(), [0]).sum().backward()
    after = full_gradients(model)["parts.1.weight"]
    assert after is not None and torch.equal(after, before)


def reads_of_the_host(action: Any) -> list[str]:
    """Which of the calls that copy a tensor to the host happen while ``action`` runs."""
    calls: list[str] = []
    names = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
    with mock.patch.multiple(
        torch.Tensor, **{name: _noting(name, getattr(torch.Tensor, name), calls) for name in names}
    ):
        action()
    return calls


def _noting(name: str, real: Any, calls: list[str]) -> Any:
    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return real(tensor, *args, **kwargs)

    return method


@distributed(2)
def test_a_rank_with_all_gradients_copies_nothing_to_the_host_and_another_copies_once() -> None:
    """In a whole step."""
    model = make_chooses(ours)
    used = [0, 1, 2] if dist.get_rank() == 0 else [1]

    def step() -> None:
        model(batch(), used).sum().backward()

    step()
    assert len(reads_of_the_host(step)) == (0 if dist.get_rank() == 0 else 1)


@distributed(2)
def test_one_copy_serves_all_groups_that_lack_a_gradient() -> None:

    first, second = chooses(), chooses()
    model = Assembled(lambda m, x: m.second(m.first(x, [0]), [1]), first=first, second=second)
    for module in (model.first, model.second, model):
        ours(module)
    model(batch()).sum().backward()
    loss = model(batch()).sum()
    assert len(reads_of_the_host(loss.backward)) == 1


# -- when graphs die -------------------------------------------------------------------------------


RESHARD = pytest.mark.parametrize("reshard", [True, False, None])


def with_optimizer(reshard: bool | None) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded ``Net`` and an optimizer, whose ``zero_grad`` sees the shards at any time."""
    net = make_net(ours, reshard_after_forward=reshard)
    return net, torch.optim.SGD(list(net.parameters()), lr=0.1)


def check_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step after which all ranks have issued the same collectives, and the right gradients."""
    recorder = record(net)
    optimizer.zero_grad()
    net(batch(seed=2, requires_grad=True)).square().sum().backward()
    calls = [call for call in recorder.calls if not call.startswith("wait")]
    assert all(each == calls for each in everyone(calls))
    plain = make_net(None)
    plain(batch(seed=2)).square().sum().backward()
    assert_gradients_of(net, plain)


@pytest.mark.cross
@RESHARD
@distributed(2, 4, matrix=[4], timeout=10)
def test_one_rank_may_keep_an_output_that_the_others_drop(reshard: bool | None) -> None:
    net, optimizer = with_optimizer(reshard)
    kept = [net(batch())]
    if dist.get_rank() != 0:
        kept.clear()
    check_step(net, optimizer)
    kept.clear()
    check_step(net, optimizer)
    assert_all_returned(net)


@RESHARD
@distributed(2, timeout=10)
def test_one_rank_may_drop_an_output_later_than_the_others(reshard: bool | None) -> None:
    net, optimizer = with_optimizer(reshard)
    kept = [net(batch()), net(batch(seed=3))]
    loss = net(batch(seed=2, requires_grad=True)).square().sum()
    if dist.get_rank() == 0:
        kept.clear()
    loss.backward()
    kept.clear()
    check_step(net, optimizer)


@RESHARD
@distributed(2, timeout=10)
def test_an_error_may_keep_a_graph_until_the_garbage_collector_runs(reshard: bool | None) -> None:
    class Cycle:
        def __init__(self, output: torch.Tensor) -> None:
            self.output, self.me = output, self

    net, optimizer = with_optimizer(reshard)
    gc.disable()
    try:
        Cycle(net(batch()))
        if dist.get_rank() == 0:
            gc.collect()
        check_step(net, optimizer)
    finally:
        gc.enable()


@distributed(2, timeout=10)
def test_a_graph_may_die_on_another_thread() -> None:
    net, optimizer = with_optimizer(False)
    died: list[bool] = []
    real = ForwardPass.__del__

    def note(use: ForwardPass) -> None:
        died.append(threading.current_thread() is threading.main_thread())
        real(use)

    with mock.patch.object(ForwardPass, "__del__", note):
        outputs = [net(batch())]
        thread = threading.Thread(target=outputs.clear)
        thread.start()
        thread.join()
    assert died and not any(died)
    check_step(net, optimizer)
    assert_all_returned(net)
