"""Training on ``vulkan``, whose bytes travel through the host: torch's own ``fully_shard``, ours.

The process group has a backend for the CPU alone; the transport is that of the how-to page. One
test measures memory over a process group that serves the device, too.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.checkpoint import full_optim_state_dict, load_safetensors, save_safetensors
from fullshard.comm import DefaultAllGather, DefaultReduceScatter
from fullshard.optim import clip_grad_norm_
from fullshard.sharding import (
    FSDPModule,
    RankMismatchError,
    fully_shard,
    unsharded,
)
from support.modules import MLPBlock
from support.ranks import distributed
from support.vulkan import is_installed, staged_group, streams_for_torch, vulkan
from support.wide.page import NEW_DEVICE, run_page

pytestmark = pytest.mark.skipif(not is_installed(), reason="nox -s device installs torchvulkan")

BAR = 0.95  # of torch's peak
BLOCKS, STEPS = 4, 2
ranks = functools.partial(distributed, timeout=240)  # shaders are compiled in the first step


def _unsharded(width: int, blocks: int = BLOCKS) -> nn.Sequential:
    vulkan()
    torch.manual_seed(0)
    return nn.Sequential(*[MLPBlock(width) for _ in range(blocks)])


def _sharded(model: nn.Module, fully_shard: Any = fully_shard) -> Any:
    """Shard a copy of ``model`` on the device, through the page's transport."""
    transport = run_page(NEW_DEVICE, only=1)["StagedTransport"]()
    sharded: Any = copy.deepcopy(model).to("vulkan")
    mesh = init_device_mesh("vulkan", (dist.get_world_size(),))
    for module in (*sharded, sharded):
        fully_shard(module, mesh=mesh)
        module.set_custom_all_gather(DefaultAllGather(transport=transport))
        module.set_custom_reduce_scatter(DefaultReduceScatter(transport=transport))
    assert isinstance(sharded, (FSDPModule, torch_fsdp.FSDPModule))
    return sharded


def _sharded_over_a_group(model: nn.Module, fully_shard: Any = fully_shard) -> Any:
    """Shard a copy of ``model`` on the device, over a process group that serves the device."""
    sharded: Any = copy.deepcopy(model).to("vulkan")
    mesh = DeviceMesh.from_group(staged_group(), "vulkan")
    for module in (*sharded, sharded):
        fully_shard(module, mesh=mesh)
    return sharded


def _batch(width: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2 * dist.get_world_size(), width, generator=generator)


def _train(model: nn.Module, width: int, device: str, reset_before: int = -1) -> torch.Tensor:
    """Train on this rank's rows, or on all of them on the CPU; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        if step == reset_before:
            vulkan().synchronize()
            vulkan().reset_peak_memory_stats()
        rows = _batch(width, step)
        if device == "vulkan":
            rows = rows.chunk(dist.get_world_size())[dist.get_rank()].to(device)
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def _local(model: nn.Module) -> list[torch.Tensor]:
    parameters: list[Any] = list(model.parameters())
    return [each.to_local().detach().cpu() for each in parameters]


@ranks(1, 2)
def test_training_equals_torchs_own_and_the_unsharded_model() -> None:
    model = _unsharded(16, blocks=2)
    ours = _sharded(model)
    losses = _train(ours, 16, "vulkan")
    with streams_for_torch():
        theirs = _sharded(model, torch_fsdp.fully_shard)
        torch.testing.assert_close(_train(theirs, 16, "vulkan"), losses)
    for mine, other in zip(_local(ours), _local(theirs), strict=True):
        torch.testing.assert_close(mine, other)
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / dist.get_world_size(), _train(model, 16, "cpu"))
    with unsharded(ours):
        for mine, expected in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.detach().cpu(), expected.detach(), rtol=0, atol=1e-4)


def _peak(sharded: Any, fully_shard: Any, width: int) -> int:
    model = sharded(_unsharded(width), fully_shard)
    _train(model, width, "vulkan", reset_before=STEPS - 1)
    peak: int = vulkan().max_memory_allocated()
    return peak


@pytest.mark.parametrize("sharded", [_sharded, _sharded_over_a_group])
@pytest.mark.parametrize("width", [256, 512])
@ranks(2)
def test_a_step_needs_less_memory_than_torchs(width: int, sharded: Any) -> None:
    ours = _peak(sharded, fully_shard, width)
    with streams_for_torch():
        theirs = _peak(sharded, torch_fsdp.fully_shard, width)
    assert ours <= BAR * theirs, f"{ours / theirs:.3f} of torch's {theirs / 2**20:.2f} MiB"


@ranks(1, 2)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model() -> None:
    model = _unsharded(16, blocks=1)
    ours = _sharded(model)
    rows = _batch(16, 0)
    ours(rows.chunk(dist.get_world_size())[dist.get_rank()].to("vulkan")).square().mean().backward()
    model(rows).square().mean().backward()
    norm = clip_grad_norm_(ours.parameters(), 0.1)
    torch.testing.assert_close(norm.cpu(), nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@ranks(1, 2)
def test_what_is_saved_is_loaded_again(tmp_path: Any) -> None:
    trained = _sharded(_unsharded(16, blocks=1))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    trained(_batch(16, 0).to("vulkan")).square().mean().backward()
    optimizer.step()
    others = [_sharded(_unsharded(16, blocks=1)) for _ in range(2)]
    others[0].load_state_dict(trained.state_dict())
    save_safetensors(trained, tmp_path / "weights")
    load_safetensors(others[1], tmp_path / "weights")
    for other in others:
        assert all(map(torch.equal, _local(other), _local(trained)))
    state = full_optim_state_dict(trained, optimizer, rank0_only=False)["state"]
    with unsharded(trained, offload_to_cpu=True):
        for name, param in trained.named_parameters():
            assert state[name]["exp_avg"].shape == param.shape
            assert state[name]["exp_avg"].abs().sum().item() > 0


@ranks(1, 2)
def test_what_is_changed_in_an_unsharded_block_is_written_back() -> None:
    model = _sharded(_unsharded(16, blocks=1))
    with unsharded(model, writeback=True), torch.no_grad():
        model[0].up.bias.fill_(3.0)
    first = dist.get_rank() == 0
    with unsharded(model, writeback=True, rank0_only=True), torch.no_grad():
        if first:
            model[0].down.bias.fill_(4.0)
    with unsharded(model, offload_to_cpu=True):
        assert model[0].up.bias.eq(3.0).all() and model[0].down.bias.eq(4.0).all()


@ranks(2)
def test_ranks_that_disagree_raise_before_the_first_gather() -> None:
    model = _sharded(_unsharded(16, blocks=1 + dist.get_rank()))
    with pytest.raises(RankMismatchError, match=r"rank 0 has .*rank 1 has "):
        model(torch.ones(2, 16, device="vulkan"))


@ranks(1, 2)
def test_the_page_runs_on_this_device() -> None:
    vulkan()
    assert run_page(NEW_DEVICE)["device"] == "vulkan"
