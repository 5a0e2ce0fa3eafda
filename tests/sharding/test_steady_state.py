"""Steady state: after its second step a sharded model makes no new memory, but gradients' at most.

Counted are the storages that operations called by ``fullshard`` make. A group's own storage, in
private memory, is none of them: it is emptied while the group is sharded, and filled again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm import (
    DefaultAllGather,
    DefaultReduceScatter,
    ProcessGroupTransport,
    Transport,
)
from fullshard.policies import MixedPrecisionPolicy
from fullshard.samehost import AllToAllTransport
from fullshard.sharding import fully_shard
from support.dispatch import StorageCounter
from support.modules import Residual
from support.ranks import distributed

WIDTH = 24
OWN = "the process group's own"
RESULTS = "buffers.allocate_from: empty"  # what collectives ask for beside what a pool keeps


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    # Parameters of several sizes, even and uneven over two ranks.
    hidden = 3 * WIDTH + 1
    blocks = [Residual(WIDTH, hidden, bias=False, scale=torch.ones(1)) for _ in range(3)]
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(nn.Sequential(*blocks, nn.Linear(WIDTH, 4)), **options)


@contextmanager
def over(name: str, model: Any) -> Iterator[None]:
    """A context in which ``model`` communicates so."""
    if name == "shared memory":
        yield
        return
    transport: Transport = ProcessGroupTransport() if name == OWN else AllToAllTransport()
    for module in model.modules():
        if hasattr(module, "set_custom_all_gather"):
            module.set_custom_all_gather(DefaultAllGather(transport=transport))
            module.set_custom_reduce_scatter(DefaultReduceScatter(transport=transport))
    yield


def made_by_step(model: Any, optimizer: Any, step: int, dtype: torch.dtype) -> Counter[str]:
    """Bytes of storages that a step makes, by who makes them; inputs are of ``dtype``."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(5, WIDTH, generator=generator, dtype=dtype)
    with StorageCounter() as counter:
        model(inputs).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return counter.made


def gradients_of(model: Any) -> int:
    """Bytes of the memory in which reduced gradients lie; they do so when a step begins to step."""
    storages = {
        param.grad.to_local().untyped_storage()._cdata: param.grad.to_local().untyped_storage()
        for param in model.parameters()
    }
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.cross
@pytest.mark.parametrize("precision", ["fp32", "mixed", "reduced in bf16"])
@pytest.mark.parametrize("transport", ["shared memory", OWN, "all-to-all"])
@distributed(2)
def test_a_step_makes_no_memory_but_of_gradients(transport: str, precision: str) -> None:
    options, dtype = {}, torch.float32
    if precision != "fp32":
        dtype = torch.bfloat16
        options["mp_policy"] = MixedPrecisionPolicy(
            dtype,
            dtype if precision == "reduced in bf16" else torch.float32,
        )
    model = make(**options)
    held = []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *args: held.append(gradients_of(model)))
    with over(transport, model):
        made = [made_by_step(model, optimizer, step, dtype) for step in range(5)]
    for step in range(2, 5):
        if precision == "reduced in bf16":  # a gradient is cast from what was reduced
            del made[step][RESULTS]
        assert made[step].total() == held[step], made[step]
