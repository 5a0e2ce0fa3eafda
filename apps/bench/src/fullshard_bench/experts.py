"""Mixtures of experts: GPTs in which each token's feed-forward network is one of several.

Owns the mathematics. In `experts` tokens choose, so how many an expert gets depends on data; in
`moe` each expert chooses an equal number of tokens, as `plan` needs. The experts of a layer are
stacked in two matrices, so each has a gradient in every step, and contestants need no support for
unused parameters; and more ranks than experts can shard their rows, where a first dim of eight
would be padded to one for each rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from fullshard_bench.gpt import GPT, GPTShape, token_batch, token_loss
from fullshard_bench.workload import Shape, Workload

__all__ = ["ChoosingExperts", "Experts", "ExpertsShape", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """The sizes of a GPT with experts; in `moe` a token has `each` experts on average."""

    width: int = 128
    layers: int = 2
    heads: int = 4
    count: int = 8
    vocabulary: int = 256
    each: int = 2


class Experts(nn.Module):
    """Sends each token through the expert that its router prefers, weighted by the preference."""

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        width, hidden = shape.width, 4 * shape.width
        self.count = shape.count
        self.router = nn.Linear(width, shape.count, bias=False)
        self.up = nn.Parameter(torch.empty(shape.count * width, hidden))
        self.down = nn.Parameter(torch.empty(shape.count * hidden, width))

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all experts `[count, width, hidden]`, and `[count, hidden, width]`."""
        return self.up.unflatten(0, (self.count, -1)), self.down.unflatten(0, (self.count, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens, width]` to the same shape."""
        flat = x.flatten(0, 1)
        preference = self.router(flat).softmax(-1)
        weight, chosen = preference.max(-1)
        output, (ups, downs) = torch.zeros_like(flat), self.matrices()
        for expert, (up, down) in enumerate(zip(ups.unbind(), downs.unbind(), strict=True)):
            (rows,) = torch.where(chosen == expert)
            mixed = functional.gelu(flat[rows] @ up) @ down
            output = output.index_add(0, rows, mixed * weight[rows, None])
        return output.view_as(x)


class ChoosingExperts(Experts):
    """Sends each expert the tokens that it prefers, to all equally many (Zhou et al. 2022)."""

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__(shape)
        self.each = shape.each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, tokens, width]` to the same shape."""
        flat = x.flatten(0, 1)
        up, down = self.matrices()
        capacity = min(flat.shape[0], max(1, flat.shape[0] * self.each // self.count))
        weight, rows = self.router(flat).softmax(-1).t().topk(capacity)  # [count, capacity] each
        mixed = functional.gelu(flat[rows] @ up) @ down  # [count, capacity, width]
        mixed = (mixed * weight[..., None].to(mixed.dtype)).flatten(0, 1)
        return torch.zeros_like(flat).index_add(0, rows.flatten(), mixed).view_as(x)


def experts(
    name: str, sizes: ExpertsShape, shape: Shape, kind: type[Experts] = Experts
) -> Workload:
    """The workload of a mixture of experts."""
    trunk = GPTShape(
        width=sizes.width, layers=sizes.layers, heads=sizes.heads, vocabulary=sizes.vocabulary
    )
    return Workload(
        name=name,
        build=lambda: GPT(trunk, shape.tokens, lambda _: kind(sizes)),
        units=lambda model: list(model.blocks),
        batch=lambda generator: token_batch(sizes.vocabulary, shape, generator),
        loss=token_loss,
        items=shape.rows * shape.tokens,
        on_meta=True,
    )
