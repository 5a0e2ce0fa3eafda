"""Inputs of checkpointed, sharded blocks in host memory, by torch's own wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint

from fullshard.sharding import fully_shard
from support.card import CARD, card
from support.parity.compare import full
from support.ranks import cpu_mesh, distributed
from support.surface.model import WIDTH, Net, batch, build


def _around_the_shards(block: nn.Module) -> nn.Module:
    return offload_wrapper(checkpoint_wrapper(fully_shard(block, mesh=cpu_mesh())))


def _inside_the_shards(block: nn.Module) -> nn.Module:
    return fully_shard(offload_wrapper(checkpoint_wrapper(block)), mesh=cpu_mesh())


def _by_hand(block: nn.Module) -> nn.Module:
    fully_shard(block, mesh=cpu_mesh())
    return Offloaded(block)


class Offloaded(nn.Module):
    """A checkpointed block, whose input is on the host between forward and backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pins = x.device.type != "cpu"
        with save_on_cpu(pin_memory=pins, device_type=x.device.type):
            output: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return output


def _wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Net:
    model = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    fully_shard(model, mesh=cpu_mesh())
    return model


WRAPPINGS = {each.__name__: each for each in (_around_the_shards, _inside_the_shards, _by_hand)}


@pytest.mark.device(paces=True)
@pytest.mark.parametrize("name", WRAPPINGS)
@distributed(2)
def test_gradients_are_those_of_the_unsharded_model(name: str) -> None:
    model, reference = _wrapped(WRAPPINGS[name]), build()
    for step in range(2):
        for each in (model, reference):
            each(batch(step)).square().mean().backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    for mine, theirs in pairs:
        assert theirs.grad is not None and mine.grad is not None
        torch.testing.assert_close(full(mine.grad).cpu(), theirs.grad)


@distributed(2)
def test_only_inputs_are_saved_and_no_parameter() -> None:
    saved: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    class Noted(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = fully_shard(block)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                output: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
            return output

    model = _wrapped(Noted)
    model(batch(0)).square().mean().backward()
    inputs = [shape for shape in saved if shape.numel()]  # checkpoint saves an empty tensor, too
    assert inputs == [torch.Size((4, WIDTH))] * len(model.blocks)


@pytest.mark.device
@distributed(2)
def test_the_device_does_not_hold_the_inputs_between_forward_and_backward() -> None:
    held: dict[bool, int] = {}
    for offloads in (False, True):
        blocks: Any = [nn.Linear(64, 64) for _ in range(6)]
        for index, block in enumerate(blocks):
            recomputed = checkpoint_wrapper(fully_shard(block, mesh=cpu_mesh()))
            blocks[index] = offload_wrapper(recomputed) if offloads else recomputed
        model = fully_shard(nn.Sequential(*blocks), mesh=cpu_mesh())
        inputs = torch.ones(32, 64, device=CARD)
        for _ in range(2):
            card.synchronize()
            before = card.memory_allocated()
            loss = model(inputs).square().mean()
            card.synchronize()
            held[offloads] = card.memory_allocated() - before
            loss.backward()
            model.zero_grad()
    assert held[False] - held[True] >= 5 * inputs.nbytes  # all but the first block's are made here
