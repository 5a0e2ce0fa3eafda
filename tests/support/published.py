"""Training runs on H100 whose speed was published, as models in plain torch.

torchtitan's: ``benchmarks/llama3_h100_202412_torchtitan.md`` of pytorch/torchtitan, tables 1 and 3.
llm-foundry's: ``scripts/train/benchmarking/README.md`` of mosaicml/llm-foundry, H100 80GB BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fullshard.policies import MixedPrecisionPolicy
from fullshard.preflight import DEVICES, Device, Plan, plan
from fullshard.sharding import fully_shard
from support.modules import Stack, in_turn

_MM = torch.ops.aten.mm.default
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention to earlier tokens, of ``[rows, tokens, heads, size]``; heads are merged."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return found.transpose(1, 2).flatten(2)


def _rotated(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotary positions, as complex numbers of float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * table[: x.shape[1], None]).flatten(3).type_as(x)


class LlamaBlock(nn.Module):
    """A layer of Llama 3.1 8B: 32 heads, of which 8 have keys and values of their own."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(4096) for _ in range(2))
        self.q, self.out = _linear(4096, 4096), _linear(4096, 4096)
        self.k, self.v = _linear(4096, 1024), _linear(4096, 1024)
        self.gate, self.up, self.down = (
            _linear(4096, 14336), _linear(4096, 14336), _linear(14336, 4096),
        )  # fmt: skip
        self.register_buffer("table", torch.ones(8192, 64, dtype=torch.complex64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        q, k, v = (each(normed).unflatten(-1, (-1, 128)) for each in (self.q, self.k, self.v))
        q, k = _rotated(q, self.table), _rotated(k, self.table)
        k, v = (each[:, :, :, None].expand(-1, -1, -1, 4, -1).flatten(2, 3) for each in (k, v))
        x = x + self.out(_attend(q, k, v))
        normed = self.norms[1](x)
        found: torch.Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return found


def _per_operation() -> Any:
    """Selective checkpointing: attention and each second matrix product are kept."""
    counts = {True: 0, False: 0}

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[ctx.is_recompute] += func is _MM
        keep = func is _ATTENTION or (func is _MM and counts[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def llama_8b() -> Stack:
    """Llama 3.1 8B with per-operation checkpointing, as torchtitan trains it."""
    blocks = [LlamaBlock() for _ in range(32)]
    for block in blocks:
        block.forward = partial(  # type: ignore[method-assign]  # as torch's wrapper does
            checkpoint, block.forward, use_reentrant=False, context_fn=_per_operation
        )
    head = in_turn(norm=nn.RMSNorm(4096), output=_linear(4096, 128256))
    return Stack(blocks, stem=nn.Embedding(128256, 4096), head=head)


class MPTBlock(nn.Module):
    """A layer of MPT: no biases, a GELU of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
        self.qkv, self.out = _linear(width, 3 * width), _linear(width, width)
        self.up, self.down = _linear(width, 4 * width), _linear(4 * width, width)
        self._heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self._heads, -1)) for each in parts)
        x = x + self.out(_attend(q, k, v))
        found: torch.Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return found


def mpt(width: int, heads: int, layers: int, *, again: bool = False) -> Stack:
    """MPT, whose layers compute their activations ``again`` or keep them; with tied tables."""
    blocks = [MPTBlock(width, heads) for _ in range(layers)]
    for block in blocks if again else ():
        block.forward = partial(  # type: ignore[method-assign]  # as above
            checkpoint, block.forward, use_reentrant=False
        )
    head = in_turn(norm=nn.LayerNorm(width, bias=False), output=_linear(width, 50368))
    model = Stack(blocks, stem=nn.Embedding(50368, width), head=head)
    head.output.weight = model.stem.weight
    return model


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that was published.

    Attributes:
        build: makes the model.
        ranks: how many GPUs.
        rows: of a GPU's micro-batch.
        tokens: of a row.
        speed: tokens per second and GPU, as published.
        reduce_dtype: of gradients.
        device: the cards.
    """

    build: Callable[[], nn.Module]
    ranks: int
    rows: int
    tokens: int
    speed: float
    reduce_dtype: torch.dtype = torch.bfloat16
    device: Device = DEVICES["h100"]

    def planned(self) -> Plan:
        """The plan of a step."""

        def build() -> nn.Module:
            with torch.device("meta"):
                return self.build()

        def batch() -> torch.Tensor:
            return torch.zeros(self.rows, self.tokens, dtype=torch.int64)

        return plan(
            build, batch, _loss, mesh=self.ranks, shard=self._shard, device=self.device,
            optimizer=partial(torch.optim.AdamW, fused=True),
        )  # fmt: skip

    def _shard(self, model: Any, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=self.reduce_dtype)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)


def _loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    found = model(words).flatten(0, 1).float()
    return functional.cross_entropy(found, words.flatten())


# torchtitan's page: memory of 2.4 TB/s (HBM2e), where the data sheet says 3.35
_LLAMA = partial(
    Run, build=llama_8b, rows=2, tokens=8192, reduce_dtype=torch.float32,
    device=replace(DEVICES["h100"], bandwidth=2.4e12),
)  # fmt: skip
RUNS = {
    "torchtitan, Llama 3.1 8B, 8 GPUs": _LLAMA(ranks=8, speed=5762),
    "torchtitan, Llama 3.1 8B, 128 GPUs": _LLAMA(ranks=128, speed=5605),
    "llm-foundry, MPT 7B, 8 GPUs": Run(
        build=partial(mpt, 4096, 32, 32), ranks=8, rows=6, tokens=2048, speed=10643
    ),
    "llm-foundry, MPT 13B, 64 GPUs": Run(
        build=partial(mpt, 5120, 40, 40), ranks=64, rows=2, tokens=2048, speed=4800
    ),
    "llm-foundry, MPT 30B, 8 GPUs, checkpointing": Run(
        build=partial(mpt, 7168, 56, 48, again=True), ranks=8, rows=3, tokens=2048, speed=2002
    ),
}
"""The runs by name; all eager, with bfloat16 parameters."""
