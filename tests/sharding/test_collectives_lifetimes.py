"""What ranks communicate does not depend on how long each of them holds an output.

Every rank runs the same forwards and backwards; when a graph dies is a rank's own affair: one may
keep an output in a list, or in an exception that waits for the garbage collector.
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
from support.events.models import batch, make_net
from support.events.recorder import (
    assert_all_returned,
    assert_close_to,
    averaged_gradients,
    full_gradients,
    ours,
    record,
)
from support.ranks import distributed
from support.surface.ranks import everyone

RESHARD = pytest.mark.parametrize("reshard", [True, False, None])


def make(reshard: bool | None) -> tuple[Any, torch.optim.Optimizer]:
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
    assert_close_to(full_gradients(net), averaged_gradients(plain))


@pytest.mark.cross
@RESHARD
@distributed(2, 4, matrix=[4], timeout=10)
def test_one_rank_may_keep_an_output_that_the_others_drop(reshard: bool | None) -> None:
    net, optimizer = make(reshard)
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
    net, optimizer = make(reshard)
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

    net, optimizer = make(reshard)
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
    net, optimizer = make(False)
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
