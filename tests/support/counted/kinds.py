"""Nine kinds of model whose memory a plan must know, each small, with a step of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fullshard.policies import MixedPrecisionPolicy
from fullshard.sharding import fully_shard
from support.modules import Stack, in_turn

_WIDTH, _WORDS, _LAYERS = 128, 1000, 8


class Attention(nn.Module):
    """Attention of 4 heads to the tokens before, or to those of an encoder."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self._causal = causal

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        given = zip((self.q, self.k, self.v), (x, other, other), strict=True)
        q, k, v = (layer(each).unflatten(-1, (4, -1)).transpose(1, 2) for layer, each in given)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=self._causal)
        merged: torch.Tensor = self.out(found.transpose(1, 2).flatten(2))
        return merged


def mlp() -> Any:
    wide = 4 * _WIDTH
    return in_turn(up=nn.Linear(_WIDTH, wide), act=nn.GELU(), down=nn.Linear(wide, _WIDTH))


class Experts(nn.Module):
    """Four experts that each choose as many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, 4)
        self.experts = nn.ModuleList(mlp() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, rows = self.router(flat).softmax(-1).topk(len(flat) // 4, dim=0)
        out = torch.zeros_like(flat)
        for expert, weight, row in zip(self.experts, weights.t(), rows.t(), strict=True):
            out = out.index_add(0, row, expert(flat[row]) * weight[:, None])
        return out.view_as(x)


class Block(nn.Module):
    """A layer of a transformer: of a decoder that attends to an encoder if it is given one."""

    def __init__(self, *, causal: bool = True, cross: bool = False, experts: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(3 if cross else 2))
        self.attention = Attention(causal=causal)
        if cross:
            self.cross = Attention(causal=False)
        self.mlp = Experts() if experts else mlp()

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed)
        if other is not None:
            x = x + self.cross(self.norms[2](x), other)
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


def gpt(*, tied: bool = False, experts: bool = False) -> Stack:
    model = Stack(
        (Block(experts=experts) for _ in range(_LAYERS)),
        stem=nn.Embedding(_WORDS, _WIDTH), head=nn.Linear(_WIDTH, _WORDS, bias=False),
    )  # fmt: skip
    if tied:
        model.head.weight = model.stem.weight
    return model


def checkpointed() -> Stack:
    model = gpt()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Embedding(_WORDS, _WIDTH)
        self.encoder = nn.ModuleList(Block(causal=False) for _ in range(_LAYERS // 2))
        self.decoder = nn.ModuleList(Block(cross=True) for _ in range(_LAYERS // 2))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = other = self.stem(words)
        for block in self.encoder:
            other = block(other)
        for block in self.decoder:
            x = block(x, other)
        out: torch.Tensor = self.head(x)
        return out


class Adapted(nn.Module):
    """A frozen layer with a trained one of rank 8 added."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 8, bias=False)
        self.up = nn.Linear(8, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return out


def lora() -> Stack:
    model = gpt()
    model.requires_grad_(False)
    block: Any
    for block in model.blocks:
        attention = block.attention
        attention.q, attention.v = Adapted(attention.q), Adapted(attention.v)
        block.mlp.up = Adapted(block.mlp.up)
    return model


def table() -> Stack:
    layers = (in_turn(linear=nn.Linear(16, 16), act=nn.ReLU()) for _ in range(2))
    return Stack(layers, stem=nn.Embedding(300_000, 16), head=nn.Linear(16, 10))


class Pictures(nn.Module):
    """Two convolutions with batch norms, and a way around them."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        before = width // stride
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(before, width, 1, stride, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + self.norms[2](self.around(x))).relu()


def resnet() -> Stack:
    stem = in_turn(
        conv=nn.Conv2d(3, 32, 7, 2, 3, bias=False), norm=nn.BatchNorm2d(32), act=nn.ReLU(),
        pool=nn.MaxPool2d(3, 2, 1),
    )  # fmt: skip
    blocks = [Pictures(32, 1), Pictures(64, 2), Pictures(128, 2), Pictures(256, 2)]
    head = in_turn(pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), linear=nn.Linear(256, 100))
    return Stack(blocks, stem=stem, head=head)


class Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]  # one of its results
        return super().forward(x)[0]


def lstm() -> Stack:
    layers = (Recurrent(_WIDTH, _WIDTH, batch_first=True) for _ in range(2))
    return Stack(layers, stem=nn.Embedding(_WORDS, _WIDTH), head=nn.Linear(_WIDTH, _WORDS))


def _words(rows: int, length: int, words: int = _WORDS) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(words, (rows, length)), torch.randint(10, (rows, length))


def _few_words() -> tuple[torch.Tensor, torch.Tensor]:
    return _words(2, 32)


def _pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 64, 64), torch.randint(100, (8,))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model and how it trains.

    Attributes:
        build: makes the unsharded model.
        batch: makes a rank's batch.
        micro_batches: backwards before a step of the optimizer.
        options: keyword arguments of ``fully_shard``.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]] = _few_words
    micro_batches: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def shard(self, model: nn.Module, mesh: DeviceMesh | None = None) -> None:
        lists = (model.get_submodule(name) for name in ("blocks", "encoder", "decoder")
                 if hasattr(model, name))  # fmt: skip
        for layers in lists:
            for layer in layers.children():
                fully_shard(layer, mesh=mesh, **self.options)
        fully_shard(model, mesh=mesh, **self.options)

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        """Cross entropy, in float32."""
        found = model(batch[0]).float()
        return functional.cross_entropy(found.flatten(0, -2), batch[1].flatten())


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {
    "gpt, tied": Kind(build=partial(gpt, tied=True)),
    "experts": Kind(build=partial(gpt, experts=True)),
    "encoder-decoder": Kind(build=EncoderDecoder),
    "lora": Kind(build=lora),
    "checkpointing": Kind(build=checkpointed, micro_batches=4),
    "checkpointing, bf16": Kind(build=checkpointed, micro_batches=4, options={"mp_policy": _BF16}),
    "300,000 rows": Kind(build=table, batch=partial(_words, 4, 64, 300_000)),
    "resnet": Kind(build=resnet, batch=_pictures),
    "lstm": Kind(build=lstm, batch=partial(_words, 8, 64)),
}
"""The kinds by name."""


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in params if each.requires_grad], lr=1e-3)
