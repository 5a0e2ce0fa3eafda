"""Attention and a perceptron, small, and how an engine with two workers cuts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

WIDTH, HEADS, HIDDEN, WORDS = 8, 4, 12, 7
WORKERS = 2

# As tensor parallel layers of an engine cut weights: rows of what a layer gives (columns of the
# product), columns of what it takes. Whatever is not named is whole on each worker.
CUTS = {
    "*.query.weight": 0,
    "*.query.bias": 0,
    "*.keys.weight": 0,
    "*.out.weight": 1,
    "*.up.weight": 0,
    "*.up.bias": 0,
    "*.down.weight": 1,
}


class Block(nn.Module):
    """Attention with half as many heads for keys and values, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)  # and values, of two heads
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape: ``[rows, length, width]``, in and out."""
        rows, length, _ = x.shape
        normed = self.norm(x)
        query = self.query(normed).view(rows, length, HEADS, -1).transpose(1, 2)
        key, value = self.keys(normed).view(rows, length, 2, HEADS // 2, -1).unbind(2)
        key, value = (each.repeat_interleave(2, 2).transpose(1, 2) for each in (key, value))
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        down: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + down


class Net(nn.Module):
    """Two blocks between words, whose number is uneven over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> Any:
        """Shape: ``[rows, length]`` in, ``[rows, length, words]`` out."""
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> torch.Tensor:
    """Words, the same on every rank."""
    return torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(step))


def cut(full: Mapping[str, torch.Tensor], worker: int) -> dict[str, torch.Tensor]:
    """The definition: what a worker has of the whole weights."""
    found = {}
    for name, value in full.items():
        dim = next((d for pattern, d in CUTS.items() if name.endswith(pattern[1:])), None)
        found[name] = value if dim is None else value.chunk(WORKERS, dim)[worker]
    return found
