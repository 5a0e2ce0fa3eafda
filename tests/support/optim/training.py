"""A small model that is trained, sharded or not, on the whole batch: for optimizers end to end."""

from __future__ import annotations

import torch
from torch import nn


class Small(nn.Module):
    """An embedding, two hidden matrices and a head."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(13, width)
        self.up = nn.Linear(width, width + 4)
        self.down = nn.Linear(width + 4, width)
        self.head = nn.Linear(width, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        logits: torch.Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return logits


def batch(step: int) -> torch.Tensor:
    """The whole batch of a step, ``[8, 5]``: the same on every rank."""
    return torch.randint(0, 13, (8, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens of predicting each from itself, shifted by one."""
    logits = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1), (tokens.flatten() + 1) % 13)
