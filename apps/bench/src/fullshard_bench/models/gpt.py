"""A GPT: pre-norm blocks, learned positions, scaled-dot-product attention, no biases.

Owns the mathematics and the presets. Built on the meta device like any module; it has no buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from fullshard_bench.errors import BenchError
from fullshard_bench.models.workload import Shape, Workload

__all__ = ["GPT", "PRESETS", "GPTShape", "gpt", "token_batch", "token_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """The sizes of a GPT."""

    width: int
    layers: int
    heads: int
    vocabulary: int = 50304
    expansion: int = 4


# About 12 * layers * width ** 2 parameters, and 2 * vocabulary * width.
PRESETS = {
    "gpt-tiny": GPTShape(width=64, layers=2, heads=2, vocabulary=256),
    "gpt-mini": GPTShape(width=256, layers=4, heads=4, vocabulary=256),  # 3 M
    "gpt-small": GPTShape(width=512, layers=6, heads=8, vocabulary=256),  # 19 M
    "gpt-124m": GPTShape(width=768, layers=12, heads=12),
    "gpt-125m": GPTShape(width=768, layers=12, heads=12),
    "gpt-350m": GPTShape(width=1024, layers=24, heads=16),
    "gpt-1b": GPTShape(width=2048, layers=20, heads=16),
    "gpt-3b": GPTShape(width=2560, layers=34, heads=32),
    "gpt-7b": GPTShape(width=4096, layers=32, heads=32),
    "gpt-8b": GPTShape(width=4096, layers=38, heads=32),
    "gpt-13b": GPTShape(width=5120, layers=40, heads=40),
    "gpt-30b": GPTShape(width=7168, layers=48, heads=56),
    "gpt-70b": GPTShape(width=8192, layers=86, heads=64),
    "gpt-175b": GPTShape(width=12288, layers=96, heads=96),
    "gpt-405b": GPTShape(width=16384, layers=126, heads=128),
}


class FeedForward(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        hidden = shape.expansion * shape.width
        self.up = nn.Linear(shape.width, hidden, bias=False)
        self.down = nn.Linear(hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens, width]` to the same shape."""
        output: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return output


class GPTBlock(nn.Module):
    """One layer: attention over the past, then a feed-forward network, each added to its input."""

    def __init__(self, shape: GPTShape, feed_forward: nn.Module) -> None:
        super().__init__()
        self.heads = shape.heads
        width = shape.width
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width, bias=False)
        self.feed = feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens, width]` to the same shape."""
        x = x + self._attend(self.attention_norm(x))
        output: torch.Tensor = x + self.feed(self.feed_norm(x))
        return output

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        # [rows, tokens, 3 * width] -> three of [rows, heads, tokens, width / heads]
        parts = self.attention_in(x).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined = mixed.transpose(1, 2).reshape(rows, tokens, width)
        output: torch.Tensor = self.attention_out(joined)
        return output


class GPT(nn.Module):
    """Predicts the next token: `[rows, tokens]` in, `[rows, tokens, vocabulary]` logits out.

    Args:
        shape: the sizes.
        context: how many tokens a row has at most.
        feed_forward: makes the feed-forward network of each block.
    """

    def __init__(
        self,
        shape: GPTShape,
        context: int,
        feed_forward: Callable[[GPTShape], nn.Module] = FeedForward,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Parameter(torch.empty(context, shape.width))
        self.blocks = nn.ModuleList(
            GPTBlock(shape, feed_forward(shape)) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, tokens, vocabulary]` of what follows each token."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def token_loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean cross-entropy of the next token, in nats, computed in float32."""
    inputs, targets = batch
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def token_batch(vocabulary: int, shape: Shape, generator: torch.Generator) -> list[torch.Tensor]:
    """Inputs and targets, int64 `[rows, tokens]` each: random tokens, and the ones that follow."""
    drawn = torch.randint(vocabulary, (shape.rows, shape.tokens + 1), generator=generator)
    return [drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()]


def gpt(name: str, sizes: GPTShape, shape: Shape) -> Workload:
    """The workload of a GPT of these sizes.

    Raises:
        BenchError: the heads do not divide the width.
    """
    if sizes.width % sizes.heads:
        raise BenchError(f"model {name}: width {sizes.width} is no multiple of heads {sizes.heads}")
    return Workload(
        name=name,
        build=lambda: GPT(sizes, shape.tokens),
        units=lambda model: list(model.blocks),
        batch=lambda generator: token_batch(sizes.vocabulary, shape, generator),
        loss=token_loss,
        items=shape.rows * shape.tokens,
        on_meta=True,
    )
