"""The model and the batches of a run over replica groups, for its members and for its replay."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["batch_of", "make_model", "make_optimizer", "make_scheduler", "rows_of"]

ROWS = 4


class Net(nn.Module):
    """Layers of odd sizes, so that shards are ragged, and one without elements on some rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.outer = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.randn(7))
        self.shift: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.inner(inputs)) + self.shift)
        return self.outer(hidden) * self.scale


def make_model(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def batch_of(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, 3, generator=generator)


def rows_of(batch: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return batch.tensor_split(ranks)[rank]


def loss_of(model: nn.Module, number: int, rank: int, ranks: int) -> torch.Tensor:
    inputs, targets = (rows_of(each, rank, ranks) for each in batch_of(number))
    return functional.mse_loss(model(inputs), targets)
