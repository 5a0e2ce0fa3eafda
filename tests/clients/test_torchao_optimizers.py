"""torchao's optimizers with states of few bits, on shards of our engine and of torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fullshard.wrappers import fsdp
from support.ranks import distributed

pytest.importorskip("torchao")
pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore"),  # what torchao says of its own parts
]

WIDTH = 128  # weights of less than 4096 elements have states in full precision


def _model(door: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    door.fully_shard(model[0])
    door.fully_shard(model)
    return model


def _step(model: nn.Sequential, optimizer: Any, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    loss: torch.Tensor = model(torch.randn(8, WIDTH, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _trained(door: Any, name: str) -> list[torch.Tensor]:
    """Losses and shards of three steps and one more after the state dict was saved and loaded."""
    import torchao.optim

    model = _model(door)
    optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    found = [_step(model, optimizer, step) for step in range(3)]
    again = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    again.load_state_dict(optimizer.state_dict())
    found.append(_step(model, again, 3))
    assert len(get_optimizer_state_dict(model, again)["state"]) == 4
    quantised = again.state[model[0].weight]["exp_avg"].to_local()
    assert type(quantised).__name__.startswith("OptimState")
    return found + [param.to_local().detach().clone() for param in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["Adam8bit", "AdamW4bit", "AdamFp8"])
@distributed(2)
def test_an_optimizer_with_states_of_few_bits_steps_as_on_torchs_own_shards(name: str) -> None:
    torch.compiler.set_stance("force_eager")
    try:
        ours, theirs = (_trained(door, name) for door in (fsdp, torch_fsdp))
    finally:
        torch.compiler.set_stance("default")
    assert all(torch.equal(mine, its) for mine, its in zip(ours, theirs, strict=True))
