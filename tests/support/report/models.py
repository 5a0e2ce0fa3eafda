"""The models of the report: GPT from the benchmark, a stack of Llama blocks, and MLPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from fullshard_bench import Shape
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import fill
from support.modules import MLPBlock

Inputs = list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained.

    Attributes:
        build: makes the model on the CPU, the same at every call.
        units: the modules that are sharded one by one.
        batch: makes the inputs of one step of one rank on the CPU, from a seed.
        loss: computes the loss of a model and its inputs.
        bar: the most that our peak may be of torch's peak; 0: no bar.
    """

    build: Callable[[], nn.Module]
    units: Callable[[nn.Module], list[nn.Module]]
    batch: Callable[[int], Inputs]
    loss: Callable[[nn.Module, Inputs], torch.Tensor]
    bar: float = 0.0


class LlamaBlock(nn.Module):
    """RMS norms, rotary positions, grouped queries, and a gated feed-forward network."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Attend to the past. ``x``: ``[rows, tokens, width]``."""
        rows, tokens, width = x.shape
        q = self.q(x).view(rows, tokens, self.heads, -1).transpose(1, 2)
        kv = self.kv(x).view(rows, tokens, 2 * self.groups, -1).transpose(1, 2)
        k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in kv.chunk(2, 1))
        mixed = F.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_1(x))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of channels by their position. ``x``: ``[rows, heads, tokens, size]``."""
    tokens, half = x.shape[-2], x.shape[-1] // 2
    rates = 1e4 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(tokens, device=x.device, dtype=x.dtype)[:, None] * rates
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return seeded


def _gpt(name: str, shape: Shape) -> Model:
    workload = make_workload(name, shape)

    def build() -> nn.Module:
        model = workload.build()
        fill(model, workload, 0, torch.device("cpu"))
        return model

    return Model(
        build=_seeded(build),
        units=lambda model: list(workload.units(model)),
        batch=lambda seed: list(workload.batch(torch.Generator().manual_seed(seed))),
        loss=workload.loss,
    )


def _stack(block: Callable[[], nn.Module], shape: tuple[int, ...], bar: float = 0.0) -> Model:
    return Model(
        build=_seeded(lambda: nn.Sequential(*[block() for _ in range(4)])),
        units=lambda model: list(model.children()),
        batch=lambda seed: [torch.randn(shape, generator=torch.Generator().manual_seed(seed))],
        loss=lambda model, inputs: model(inputs[0]).square().mean(),
        bar=bar,
    )


def models(small: bool) -> dict[str, Model]:
    """Return the models by name; small ones for a device that computes on the CPU."""
    gpt, rows, tokens = ("gpt-tiny", 1, 32) if small else ("gpt-small", 8, 512)
    width = 64 if small else 1024
    return {
        gpt: _gpt(gpt, Shape(rows=rows, tokens=tokens)),
        f"4 Llama blocks of width {width}": _stack(
            lambda: LlamaBlock(width, heads=8, groups=2), (rows, tokens, width)
        ),
        "4 MLP blocks of width 256": _stack(lambda: MLPBlock(256), (2, 256), bar=0.95),
        "4 MLP blocks of width 512": _stack(lambda: MLPBlock(512), (2, 512), bar=0.95),
    }
