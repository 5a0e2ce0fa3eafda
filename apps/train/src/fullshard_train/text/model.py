"""A byte-level GPT: pre-norm blocks, rotary positions, scaled-dot-product attention.

Owns the mathematics and the initial values. Refuses to know that it is sharded: it is built on the
meta device like any module, and each initial value is a function of the parameter's name and the
seed only, so initial values do not depend on the world size.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fullshard_train.settings.sections import ModelConfig
from fullshard_train.training.optim import step_by

__all__ = ["BYTES", "GPT", "TextBlock", "initial_value"]

BYTES = 256


class GPT(nn.Module):
    """Predicts the next byte: `[rows, time]` bytes in, `[rows, time, 256]` logits out.

    Args:
        config: the shape.
        recompute: drop each block's activations and compute them again in backward.
    """

    def __init__(self, config: ModelConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.recompute = recompute
        self.embedding = nn.Embedding(BYTES, config.width)
        self.blocks = nn.ModuleList(TextBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.output = nn.Linear(config.width, BYTES, bias=False)
        if config.tied:
            self.output.weight = self.embedding.weight
        step_by(self.embedding.weight, algorithm="adamw")
        step_by(self.output.weight, algorithm="adamw")

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, time, 256]` of the byte after each of `data`, int64 `[rows, time]`."""
        x = self.embedding(data)
        cosine, sine = rotation(data.shape[1], self.head_width, device=data.device)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, cosine, sine, use_reentrant=False)
            else:
                x = block(x, cosine, sine)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


class TextBlock(nn.Module):
    """One layer: attention over the past, then a feed-forward network, each added to its input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention_in = nn.Linear(config.width, 3 * config.width, bias=False)
        step_by(self.attention_in.weight, split=3)  # queries, keys, values
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp_in = nn.Linear(config.width, config.expansion * config.width, bias=False)
        self.mlp_out = nn.Linear(config.expansion * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """`[rows, time, width]` to the same shape; `cosine` and `sine` are those of `rotation`."""
        x = x + self._attend(self.attention_norm(x), cosine, sine)
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        output: torch.Tensor = x + self.mlp_out(hidden)
        return output

    def _attend(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        rows, time, width = x.shape
        # [rows, time, 3 * width] -> three of [rows, heads, time, head_width]
        parts = self.attention_in(x).view(rows, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, time, width))
        return output


def rotation(
    time: int, head_width: int, *, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angles of rotary positions, both float32 `[time, head_width / 2]`.

    Position t turns pair i by t * 10000 ** (-2i / head_width): https://arxiv.org/abs/2104.09864,
    section 3.2.2.
    """
    pairs = torch.arange(0, head_width, 2, device=device, dtype=torch.float32)
    frequencies = torch.exp(pairs * (-math.log(10000.0) / head_width))
    angles = torch.arange(time, device=device, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """`x`, `[..., time, head_width]`, with its pairs (i, i + head_width / 2) turned."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def initial_value(
    name: str, shape: torch.Size, *, layers: int, generator: torch.Generator
) -> torch.Tensor:
    """The float32 CPU tensor that the parameter called `name` starts from.

    Norms start at one. Matrices are normal with deviation 0.02, and those that write into the
    residual stream are divided by sqrt(2 * layers), as in GPT-2 (Radford et al. 2019, section 2.3).
    """
    if len(shape) < 2:
        return torch.ones(shape)
    deviation = 0.02
    if name.endswith(("attention_out.weight", "mlp_out.weight")):
        deviation /= math.sqrt(2 * layers)
    return torch.randn(shape, generator=generator) * deviation
