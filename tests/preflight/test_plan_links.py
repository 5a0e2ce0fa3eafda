"""What a plan says of links: tensor parallelism's collectives, and offload's copies over PCIe."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fullshard.policies import CPUOffloadPolicy, OffloadPolicy
from fullshard.preflight import Category, Plan, Timeline, plan
from fullshard.preflight.costs.collectives import Collective
from fullshard.preflight.planning.choices import blocks_of
from fullshard.preflight.planning.recorder import Transfer
from fullshard.preflight.training import adamw
from fullshard.sharding import fully_shard
from support.modules import Stack
from support.products import few

WIDTH, ROWS, LAYERS = 256, 128, 2
WEIGHT = WIDTH * WIDTH * 4
SHARDS, TENSOR = 16, 4


def make_layer() -> nn.Module:
    up, down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    return nn.Sequential(up, nn.ReLU(), down)


def stack() -> Stack:
    return Stack(make_layer() for _ in range(LAYERS))


def _fused(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)  # with its counters of steps on the device


def _plan(shard: Any, **options: Any) -> tuple[Plan, Timeline]:
    settings: dict[str, Any] = {"mesh": SHARDS, "device": "h100", **options}
    batch = torch.empty(ROWS, WIDTH)
    found = plan(stack, batch, lambda model, x: model(x).square().mean(), shard=shard, **settings)
    assert found.time is not None
    return found, found.time


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in blocks_of(model):
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


@cache
def _with_tensor_parallelism() -> tuple[Plan, Timeline]:
    return _plan(_tensor_parallel, mesh={"shard": SHARDS, "tp": TENSOR})


def test_tensor_parallelism_sends_along_its_own_axis() -> None:
    found, time = _with_tensor_parallelism()
    assert found.name == f"{SHARDS}x{TENSOR}"
    sent = {axis.name: (axis.size, traffic) for axis, traffic in time.traffic.items()}
    assert set(sent) == {"shard", "tp"}
    size, traffic = sent["tp"]
    assert size == TENSOR
    # One all-reduce of activations for each layer in forward, and in backward of the input of all
    # but the first, whose input needs no gradient.
    reduced = (2 * LAYERS - 1) * 2 * (TENSOR - 1) / TENSOR * ROWS * WIDTH * 4
    assert traffic.nbytes == pytest.approx(reduced)
    assert traffic.link == "NVLink 4", "four neighbours of one host"
    assert sent["shard"][1].link == "400 Gbit/s network"
    assert f"along tp, {TENSOR} ranks" in str(found)


def test_a_functional_collective_runs_on_a_stream_of_its_group_and_is_waited_for() -> None:
    _, time = _with_tensor_parallelism()
    spans = time.spans
    reductions = [
        index
        for index, each in enumerate(spans)
        if isinstance(each.launch.work, Collective) and each.launch.work.axis.name == "tp"
    ]
    for index in reductions:
        launch = spans[index].launch
        assert time.streams[launch.stream] == "collectives of mesh_tp"
        computing = [each for each in spans if time.streams[each.launch.stream] == "default"]
        later = [each for each in computing if each.launch.after.get(launch.stream, 0)]
        first = next(each for each in later if each.launch.after[launch.stream] >= launch.number)
        assert first.start >= spans[index].end


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        ({"shard": 0}, ValueError, "each a size of 1 or more"),
        ({}, ValueError, "at least one axis"),
        ({"shard": 2.0}, TypeError, "pass a number of ranks for each name"),
    ],
)
def test_a_mesh_of_names_is_checked(mesh: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _plan(_tensor_parallel, mesh=mesh)


def _offloaded(policy: OffloadPolicy, model: nn.Module) -> None:
    for layer in blocks_of(model):
        fully_shard(layer, offload_policy=policy)
    fully_shard(model, offload_policy=policy)


@cache
def _with(policy: OffloadPolicy) -> tuple[Plan, Timeline]:
    return _plan(partial(_offloaded, policy))


SHARD_BYTES = 2 * LAYERS * WEIGHT // SHARDS  # of all parameters; as many of all gradients


def test_what_is_offloaded_is_the_hosts_memory_and_not_in_the_peak() -> None:
    (kept, _), (offloaded, _) = _with(OffloadPolicy()), _with(CPUOffloadPolicy())
    assert kept.host == 0
    assert kept.categories[Category.SHARDS] == SHARD_BYTES
    for category in (Category.SHARDS, Category.GRADIENTS, Category.OPTIMIZER_STATE):
        assert offloaded.categories[category] < 100, "AdamW's counters of steps"
    assert offloaded.peak < kept.peak
    # Parameters, gradients, and AdamW's two averages; and what its step makes on the way.
    assert 4 * SHARD_BYTES <= offloaded.host <= 7 * SHARD_BYTES
    assert offloaded.held < SHARD_BYTES / 10
    assert "at most in the host's memory, beside it" in str(offloaded)


def test_offload_copies_over_pcie_on_the_engines_streams() -> None:
    _, time = _with(CPUOffloadPolicy())
    copies = [each for each in time.spans if isinstance(each.launch.work, Transfer)]
    into = [each for each in copies if not each.launch.work.to_host]  # type: ignore[union-attr]
    assert {time.streams[each.launch.stream] for each in into} == {"copy_in"}
    assert all(each.end - each.start >= time.device.host.latency for each in copies)
    sent = time.copies
    assert sent["copy to the host"].nbytes == SHARD_BYTES
    gathers = 2 * SHARD_BYTES  # in forward, and in backward again
    assert sent["copy to the device"].nbytes == gathers
    assert "copy to the host: " in str(time)
    assert "over PCIe 5" in str(time)


@pytest.mark.parametrize("optimizer", few([adamw, _fused], adamw))
def test_an_optimizer_on_the_host_steps_after_the_gradients_came_and_takes_its_time(
    optimizer: Any,
) -> None:
    (_, kept), (_, offloaded) = (
        _plan(partial(_offloaded, each), optimizer=optimizer)
        for each in (OffloadPolicy(), CPUOffloadPolicy())
    )
    assert "host" not in kept.streams.values()
    assert offloaded.copies["copy to the host"].nbytes == SHARD_BYTES
    work = [each for each in offloaded.spans if offloaded.streams[each.launch.stream] == "host"]
    assert {each.launch.place.phase for each in work} == {"optimizer"}
    arrived = max(
        each.end
        for each in offloaded.spans
        if isinstance(each.launch.work, Transfer) and each.launch.work.to_host
    )
    assert min(each.start for each in work) >= arrived
    assert offloaded.step_time > kept.step_time


@pytest.mark.parametrize(
    ("policy", "into", "out"),
    [
        (CPUOffloadPolicy(parameters=False), 1, 2),  # the results; what is stepped
        (CPUOffloadPolicy(optimizer_state=False), 4, 2),  # gathers, what is stepped; the results
    ],
    ids=str,
)
def test_each_choice_of_offload_copies_what_it_says(
    policy: CPUOffloadPolicy, into: int, out: int
) -> None:
    _, time = _with(policy)
    assert time.copies["copy to the device"].nbytes == into * SHARD_BYTES
    assert time.copies["copy to the host"].nbytes == out * SHARD_BYTES
