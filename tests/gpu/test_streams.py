"""Real streams: whoever reads waits for whoever writes, although the host is far ahead of both.

Every test keeps a stream busy before it writes what another stream is to read: code that does not
wait reads the old values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm import (
    CommStreams,
    DefaultAllGather,
    DefaultReduceScatter,
    Layout,
    TensorSpec,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
    reduction_scaling,
)
from fullshard.sharding import FSDPModule
from support.collectives import ToldAllGather, gather_config, reduce_config
from support.wide.gpu import CARD, card, card_world, late
from support.wide.model import loss_of, make_batch, make_stack, shard
from support.wide.tensors import OneStream

pytestmark = pytest.mark.gpu

SPECS = [
    TensorSpec(shape=(1000, 300), dtype=torch.float32),
    TensorSpec(shape=(777,), dtype=torch.float32),
]
ROUNDS = 4


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    with card_world(tmp_path_factory.mktemp("world")) as mesh:
        yield mesh.get_group()


@pytest.mark.parametrize("streams", [CommStreams, OneStream])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_gather_sees_what_was_written_last(
    group: dist.ProcessGroup, streams: type[CommStreams], async_op: bool
) -> None:
    layout = Layout(SPECS, 1)
    config = gather_config(group, DefaultAllGather(), streams=streams(CARD), device=CARD)
    shards = [torch.zeros(spec.shape, device=CARD) for spec in SPECS]
    results = []
    for number in range(1, ROUNDS + 1):
        late()
        for each in shards:
            each.fill_(number)
        config.streams.synchronize_with_current()
        in_flight = foreach_all_gather(shards, layout, config, async_op=async_op)
        late()  # the copy out comes late, too: its buffer must not go to the next gather before
        outputs = [torch.zeros(spec.shape, device=CARD) for spec in SPECS]
        foreach_all_gather_copy_out(in_flight, outputs)
        results.append((number, outputs))
    for number, outputs in results:
        assert all(bool(output.eq(number).all()) for output in outputs)


@pytest.mark.parametrize("streams", [CommStreams, OneStream])
def test_a_reduction_reads_gradients_that_are_freed_at_once(
    group: dist.ProcessGroup, streams: type[CommStreams]
) -> None:
    layout = Layout(SPECS, 1)
    scaling = reduction_scaling(1, torch.float32, averages=True, divide_factor=2.0)
    options: dict[str, Any] = {"streams": streams(CARD), "device": CARD}
    config = reduce_config(group, DefaultReduceScatter(), scaling, **options)
    flights = []
    for number in range(1, ROUNDS + 1):
        gradients = [torch.zeros(spec.shape, device=CARD) for spec in SPECS]
        late()
        for gradient in gradients:
            gradient.fill_(2 * number)
        flights.append((number, foreach_reduce(gradients, layout, config)))
        del gradients, gradient
        for spec in SPECS:  # takes the memory that was just freed
            torch.full(spec.shape, float("nan"), device=CARD)
    for number, flight in flights:
        assert all(bool(shard.eq(number).all()) for shard in flight.wait().shards)


def test_the_engine_gathers_beside_the_compute_stream(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, CARD.type)
    streams: list[Any] = []
    noting = ToldAllGather(lambda output, group: streams.append(card.current_stream()))
    model = shard(make_stack().to(CARD), mesh=mesh)
    for module in (*model.blocks, model):
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(noting)
    compute = card.Stream()
    for stream in (card.current_stream(), compute):
        streams.clear()
        stream.wait_stream(card.current_stream())  # for what the other one wrote
        with card.stream(stream):
            loss_of(model, make_batch(4, 0).to(CARD)).backward()
        assert streams
        assert all(each != stream for each in streams)
    card.synchronize()


def test_a_forward_sees_an_optimizer_step_that_ends_late(group: dist.ProcessGroup) -> None:
    mesh = DeviceMesh.from_group(group, CARD.type)
    model = shard(make_stack().to(CARD), mesh=mesh)
    plain = make_stack().to(CARD)
    batch = make_batch(4, 0).to(CARD)
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            loss_of(each, batch).backward()
            late()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(loss_of(model, batch), loss_of(plain, batch), rtol=1e-5, atol=1e-7)
