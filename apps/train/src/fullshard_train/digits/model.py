"""A small image classifier: two convolutions, then transformer blocks over what they leave.

Owns the mathematics and the initial values; like `fullshard_train.text.model`, it knows nothing of
shards.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fullshard_train.settings.sections import DigitsConfig

__all__ = ["CLASSES", "SIDE", "Classifier", "DigitsBlock", "Stem", "initial_value"]

SIDE = 8
"""The side of an image in pixels."""

CLASSES = 10
_PLACES = (SIDE // 2) ** 2


class Classifier(nn.Module):
    """Predict the digit of an image: `[rows, 8, 8]` pixels in, `[rows, 10]` logits out.

    Args:
        config: the shape.
        recompute: drop each block's activations and compute them again in backward.
    """

    def __init__(self, config: DigitsConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.stem = Stem(config)
        self.blocks = nn.ModuleList(DigitsBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.output = nn.Linear(config.width, CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, 10]` of images `[rows, 8, 8]`, pixels from 0 to 1."""
        x = self.stem(pixels)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: torch.Tensor = self.output(self.norm(x).mean(dim=1))
        return logits


class Stem(nn.Module):
    """Convolutions that halve the side: `[rows, 8, 8]` to `[rows, 16 places, width]`.

    A learned vector distinguishes the places.
    """

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, config.channels, kernel_size=3, padding=1)
        self.second = nn.Conv2d(config.channels, config.width, kernel_size=3, padding=1, stride=2)
        self.place = nn.Parameter(torch.zeros(_PLACES, config.width))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The features of the convolutions at each place, and the place."""
        # The pixels come in float32; under mixed precision the weights have another dtype.
        x = pixels.to(self.first.weight.dtype)[:, None]
        x = functional.gelu(self.second(functional.gelu(self.first(x))))
        output: torch.Tensor = x.flatten(2).transpose(1, 2) + self.place
        return output


class DigitsBlock(nn.Module):
    """Attention among all places, then a feed-forward network, each added to its input."""

    def __init__(self, config: DigitsConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        # Without a bias: that of a key changes no attention, so its gradient would be noise.
        self.attention_in = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, places, width]` to the same shape."""
        rows, places, width = x.shape
        # [rows, places, 3 * width] -> three of [rows, heads, places, width / heads]
        parts = self.attention_in(self.attention_norm(x))
        parts = parts.view(rows, places, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind(0))
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, places, width))
        output: torch.Tensor = x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return output


def initial_value(
    name: str, shape: torch.Size, *, layers: int, generator: torch.Generator
) -> torch.Tensor:
    """The float32 CPU tensor that the parameter called `name` starts from.

    Norms start at one, biases at zero. Weights are normal with variance 1 / inputs, convolutions
    2 / inputs (He et al. 2015, https://arxiv.org/abs/1502.01852, section 2.2); those that write
    into the residual stream are divided by sqrt(2 * layers).
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) < 2:
        return torch.ones(shape)
    if name.endswith("place"):
        return torch.randn(shape, generator=generator) * 0.02
    deviation = math.sqrt((2 if len(shape) == 4 else 1) / math.prod(shape[1:]))
    if name.endswith(("attention_out.weight", "mlp_out.weight")):
        deviation /= math.sqrt(2 * layers)
    return torch.randn(shape, generator=generator) * deviation
