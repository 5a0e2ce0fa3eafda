"""Torch's own ``fully_shard`` beside ours on the device: no more memory, in any set-up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh

from fullshard import policies, sharding
from support.card import CARD, card
from support.modules import MLPBlock
from support.ranks import cpu_mesh, distributed

pytestmark = pytest.mark.device

BLOCKS, STEPS = 8, 2  # enough blocks that all their reduced gradients are more than one's buffers
BAR = 0.95  # of torch's peak, in the plain set-up

TORCHS, OURS = (torch_fsdp, torch_fsdp), (sharding, policies)
Engine = tuple[ModuleType, ModuleType]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a program asks of ``fully_shard``.

    Attributes:
        options: makes the options, given the module that has the policies.
        dtype: of the parameters.
        micro_batches: of a step.
        before: is called with the model and whether the next backward is the last of the step.
    """

    options: Callable[[Any], dict[str, Any]] = lambda chosen: {}
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    before: Callable[[Any, bool], object] = lambda model, last: None


def _reduced_in(dtype: torch.dtype, param_dtype: torch.dtype | None = None) -> Any:
    return lambda chosen: {
        "mp_policy": chosen.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=dtype)
    }


def _offload(chosen: Any) -> dict[str, Any]:
    return {"offload_policy": chosen.CPUOffloadPolicy()}


def _state_on_cpu(chosen: Any) -> dict[str, Any]:
    """Return the option of ours that torch lacks: its parameters stay on the device."""
    if chosen is not policies:
        return {}
    return {"offload_policy": policies.CPUOffloadPolicy(parameters=False)}


def _hooked(model: Any, last: bool) -> None:
    for block in model:
        block.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5))


SHARDED = {
    "plain": Setup(),
    "offload": Setup(options=_offload),
    "offload, accumulated": Setup(options=_offload, micro_batches=2),
    "reduced in bf16": Setup(options=_reduced_in(torch.bfloat16)),
    "stored in bf16": Setup(options=_reduced_in(torch.float32), dtype=torch.bfloat16),
    "stored in bf16, hooked": Setup(
        options=_reduced_in(torch.float32), dtype=torch.bfloat16, before=_hooked
    ),
    "computed in bf16": Setup(options=_reduced_in(torch.float32, torch.bfloat16)),
    "accumulated": Setup(micro_batches=2),
    "accumulated, state on the CPU": Setup(options=_state_on_cpu, micro_batches=2),
    "accumulated, not waited for": Setup(
        micro_batches=2, before=lambda model, last: model.set_is_last_backward(last)
    ),
}
REPLICATED = {
    name: SHARDED[name] for name in ("plain", "stored in bf16", "accumulated", "offload")
} | {
    "reduced over replicas at last": Setup(
        micro_batches=3, before=lambda model, last: model.set_requires_all_reduce(last)
    ),
}


def _peak(engine: Engine, setup: Setup, width: int, mesh: DeviceMesh) -> int:
    """The most memory of forwards and backwards in the last of some steps."""
    gc.collect()  # or the other engine's model counts as this one's
    api, chosen = engine
    blocks = [MLPBlock(width) for _ in range(BLOCKS)]
    model: Any = nn.Sequential(*blocks).to(CARD, setup.dtype)
    for module in (*model, model):
        api.fully_shard(module, mesh=mesh, **setup.options(chosen))
    optimizer, peak = torch.optim.SGD(model.parameters(), lr=1e-3), 0
    for _ in range(STEPS):
        card.synchronize()
        card.reset_peak_memory_stats()
        for number in range(setup.micro_batches):
            setup.before(model, number == setup.micro_batches - 1)
            model(torch.randn(2, width, device=CARD, dtype=setup.dtype)).square().mean().backward()
        card.synchronize()
        peak = card.max_memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
    return peak


def _assert_no_more(setup: Setup, width: int, mesh: DeviceMesh, bar: float = 1.0) -> None:
    theirs, ours = (_peak(engine, setup, width, mesh) for engine in (TORCHS, OURS))
    assert ours <= bar * theirs, f"{ours / theirs:.4f} of torch's {theirs / 2**20:.2f} MiB"


@pytest.mark.parametrize("width", [256, 512])
@distributed(2)
def test_a_step_needs_less_memory_than_torchs(width: int) -> None:
    _assert_no_more(SHARDED["plain"], width, cpu_mesh(), BAR)


@pytest.mark.parametrize("name", SHARDED)
@distributed(2)
def test_no_set_up_needs_more_memory_than_torchs(name: str) -> None:
    _assert_no_more(SHARDED[name], 256, cpu_mesh())


@pytest.mark.parametrize("name", REPLICATED)
@distributed(4)
def test_nor_does_one_over_replicas(name: str) -> None:
    _assert_no_more(REPLICATED[name], 256, cpu_mesh((2, 2), ("replicate", "shard")))
