"""Torch's own ``fully_shard`` beside ours on the device: the same bits, and less memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from fullshard.sharding import fully_shard
from support.card import CARD, card
from support.device.pace import pace_of, paced
from support.modules import MLPBlock
from support.ranks import cpu_mesh, distributed

pytestmark = pytest.mark.device

BLOCKS, STEPS = 4, 3
BAR = 0.95  # of torch's peak


def _train(fully_shard: Any, width: int, reset_before: int = 0) -> list[torch.Tensor]:
    """Train, and return the losses and this rank's parameters; count the peak from a step on."""
    torch.manual_seed(0)
    model = nn.Sequential(*[MLPBlock(width) for _ in range(BLOCKS)]).to(CARD)
    for module in (*model, model):
        fully_shard(module, mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for step in range(STEPS):
        if step == reset_before:
            card.synchronize()
            card.reset_peak_memory_stats()
        loss = model(torch.randn(2, width, device=CARD)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters: list[Any] = list(model.parameters())
    return [each.cpu() for each in (*losses, *(each.to_local().detach() for each in parameters))]


@distributed(2)
def test_both_give_the_same_bits_whatever_the_delays() -> None:
    expected = _train(torch_fsdp.fully_shard, 16)
    assert all(bool(each.isfinite().all()) for each in expected)
    for number in range(8):
        for engine in (torch_fsdp.fully_shard, fully_shard):
            with paced(pace_of(number)):
                found = _train(engine, 16)
            assert all(map(torch.equal, found, expected))


def _peak(fully_shard: Any, width: int) -> int:
    gc.collect()  # or the other engine's model counts as this one's
    _train(fully_shard, width, reset_before=STEPS - 1)
    peak: int = card.max_memory_allocated()
    return peak


@pytest.mark.parametrize("width", [256, 512])
@distributed(2)
def test_a_step_needs_less_memory_than_torchs(width: int) -> None:
    theirs, ours = _peak(torch_fsdp.fully_shard, width), _peak(fully_shard, width)
    assert ours <= BAR * theirs, f"{ours / theirs:.3f} of torch's {theirs / 2**20:.2f} MiB"
