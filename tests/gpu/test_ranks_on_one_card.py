"""Several ranks share the one card: as processes over gloo, and as threads of this process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from fullshard.comm import (
    CommStreams,
    DefaultAllGather,
    DefaultReduceScatter,
    Layout,
    all_gather_tensors,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
    reduce_scatter_tensors,
)
from support.collectives import gather_config, reduce_config
from support.ranks import distributed, world
from support.threads.ranks import ThreadRank
from support.threads.world import run_program_on_threads
from support.wide.gpu import CARD, card, card_mesh, late
from support.wide.model import (
    LEARNING_RATE,
    Stack,
    local,
    loss_of,
    make_batch,
    make_stack,
    shard,
    train_whole,
)
from support.wide.tensors import full_tensors, shard_of, shards_of, specs_of

pytestmark = pytest.mark.gpu

STEPS = 3


def _train(model: Stack, rank: int, world_size: int) -> list[torch.Tensor]:
    """This rank's shards of the parameters after the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        part = make_batch(world_size, step).chunk(world_size)[rank].to(CARD)
        loss_of(model, part).backward()
        late()
        optimizer.step()
        optimizer.zero_grad()
    return [local(param) for param in model.parameters()]


def _whole(world_size: int) -> list[torch.Tensor]:
    whole = make_stack().to(CARD)
    train_whole(whole, [make_batch(world_size, step).to(CARD) for step in range(STEPS)])
    return [param.detach() for param in whole.parameters()]


def _refusal() -> str:
    """Why this torch's gloo does not move what is on the card; empty if it does."""
    card.set_device(CARD)
    world_size = dist.get_world_size()
    value = torch.ones(world_size, device=CARD)
    try:
        group = world()
        reduce_scatter_tensors([value], None, group)
        specs = specs_of((torch.float32,))[:1]
        shard = torch.ones(specs[0].shard_shape(dist.get_rank(), world_size), device=CARD)
        all_gather_tensors([shard], specs, group)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@distributed(2, 4)
def test_gloo_ranks_on_one_card_equal_the_unsharded_model(world_size: int) -> None:
    refusal = _refusal()
    if refusal:
        pytest.skip(f"this torch's gloo does not move tensors of the card: {refusal}")
    shards = _train(shard(make_stack().to(CARD), mesh=card_mesh()), dist.get_rank(), world_size)
    for index, expected in enumerate(_whole(world_size)):
        mine = shard_of(expected, 0, dist.get_rank(), world_size)
        torch.testing.assert_close(shards[index], mine, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 8])
def test_threads_on_one_card_equal_the_unsharded_model(world_size: int) -> None:
    card.init()
    original = make_stack().to(CARD)

    def body(rank: ThreadRank) -> list[torch.Tensor]:
        card.set_device(CARD)
        own = shard(copy.deepcopy(original), mesh=card_mesh())
        return _train(own, rank.rank, world_size)

    results = run_program_on_threads(body, world_size)
    card.synchronize()
    for column, expected in zip(zip(*results, strict=True), _whole(world_size), strict=True):
        torch.testing.assert_close(torch.cat(list(column)), expected, rtol=1e-5, atol=1e-6)


def test_32_threads_gather_and_reduce_on_one_card() -> None:
    world_size = 32
    card.init()
    specs = specs_of((torch.float32,))
    full = [each.to(CARD) for each in full_tensors(specs)]

    def body(rank: ThreadRank) -> None:
        card.set_device(CARD)
        streams = CommStreams(CARD)  # of its own: all_gather_tensors has one set per process
        shards = shards_of(full, specs, rank.rank, world_size)
        for each, gathered in zip(full, _gather(rank, shards, streams), strict=True):
            assert torch.equal(each, gathered)
        means = _reduce(rank, full, streams)  # all ranks hold the same, so it is the mean
        for mean, part in zip(means, shards, strict=True):
            torch.testing.assert_close(mean, part, rtol=world_size * 2**-23, atol=0)

    run_program_on_threads(body, world_size)


def _gather(
    rank: ThreadRank, shards: list[torch.Tensor], streams: CommStreams
) -> list[torch.Tensor]:
    specs = specs_of((torch.float32,))
    layout = Layout(specs, rank.world_size)
    config = gather_config(rank.group, DefaultAllGather(), streams=streams, device=CARD)
    streams.synchronize_with_current()
    outputs = [torch.empty(spec.shape, device=CARD) for spec in specs]
    foreach_all_gather_copy_out(foreach_all_gather(shards, layout, config), outputs)
    return outputs


def _reduce(
    rank: ThreadRank, gradients: list[torch.Tensor], streams: CommStreams
) -> list[torch.Tensor]:
    layout = Layout(specs_of((torch.float32,)), rank.world_size)
    config = reduce_config(rank.group, DefaultReduceScatter(), streams=streams, device=CARD)
    return foreach_reduce(gradients, layout, config).wait().shards
