"""Torch's own ``fully_shard`` beside ours on the device: less memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from fullshard.sharding import fully_shard
from support.card import CARD, card
from support.modules import MLPBlock
from support.ranks import cpu_mesh, distributed

pytestmark = pytest.mark.device

BLOCKS, STEPS = 4, 3
BAR = 0.95  # of torch's peak


def _peak(fully_shard: Any, width: int) -> int:
    """The most memory of the last of some steps."""
    gc.collect()  # or the other engine's model counts as this one's
    model = nn.Sequential(*[MLPBlock(width) for _ in range(BLOCKS)]).to(CARD)
    for module in (*model, model):
        fully_shard(module, mesh=cpu_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        card.synchronize()
        card.reset_peak_memory_stats()
        model(torch.randn(2, width, device=CARD)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    card.synchronize()
    peak: int = card.max_memory_allocated()
    return peak


@pytest.mark.parametrize("width", [256, 512])
@distributed(2)
def test_a_step_needs_less_memory_than_torchs(width: int) -> None:
    theirs, ours = _peak(torch_fsdp.fully_shard, width), _peak(fully_shard, width)
    assert ours <= BAR * theirs, f"{ours / theirs:.3f} of torch's {theirs / 2**20:.2f} MiB"
