"""What scripts written for FairScale do: wrap, train in mixed precision, save, load.

``nn_of`` is where the names of ``fairscale.nn`` come from: the import line that is changed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 3 * dim)
        self.fc2 = nn.Linear(3 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


def build(nn_of: Any, dim: int = 6, layers: int = 3, **fsdp_params: Any) -> Any:
    """A model whose layers are wrapped as it is built."""
    torch.manual_seed(0)
    with nn_of.enable_wrap(wrapper_cls=nn_of.FullyShardedDataParallel, **fsdp_params):
        model = nn.Sequential(
            nn.Linear(dim, dim),
            *[nn_of.wrap(Layer(dim)) for _ in range(layers)],
            nn_of.auto_wrap(nn.Sequential(nn.Linear(dim, dim), nn.Linear(dim, 2))),
        )
        return nn_of.wrap(model)


def run(nn_of: Any, folder: str, steps: int = 4, **fsdp_params: Any) -> list[float]:
    """The loss of each step, of which the later half is after a restart."""
    model = build(nn_of, **fsdp_params)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = _train(model, optim, range(steps // 2))

    path = os.path.join(folder, "checkpoint.pt")
    state = {"model": model.state_dict(), "optim": model.gather_full_optim_state_dict(optim)}
    if torch.distributed.get_rank() == 0:
        torch.save(state, path)
    torch.distributed.barrier()

    model = build(nn_of, **fsdp_params)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optim.load_state_dict(model.get_shard_from_optim_state_dict(state["optim"]))
    return losses + _train(model, optim, range(steps // 2, steps))


def _train(model: Any, optim: torch.optim.Optimizer, steps: Any) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        first, second = torch.randn(2, 8, 6, generator=generator)
        optim.zero_grad()
        with model.no_sync():
            model(first).float().square().mean().backward()
        loss = model(second).float().square().mean()
        loss.backward()
        model.clip_grad_norm_(0.5)
        optim.step()
        losses.append(loss.item())
    return losses
