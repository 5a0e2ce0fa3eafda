"""A model whose parameters are tied: one matrix in two modules, and one module under two names."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from support.surface.model import WIDTH


class Tied(nn.Module):
    """One matrix used as embedding and as head, and two blocks that are the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embed.weight
        self.seen: list[bool] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.head.weight is self.embed.weight)
        self.seen.append(self.first.weight is self.second.weight)
        self.seen.append(not isinstance(self.head.weight, DTensor))
        hidden = torch.tanh(self.second(torch.tanh(self.first(self.embed(tokens)))))
        return self.head(hidden)
