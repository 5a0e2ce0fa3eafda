"""The small models of the parity tests, each with its batches, its loss and its groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.modules import Assembled, in_turn

ROWS = 8  # rows of a whole batch: every world size in use divides it
VOCABULARY, LENGTH, WIDTH, HEADS = 13, 7, 8, 2

Batch = tuple[torch.Tensor, torch.Tensor]
Unit = nn.Module | list[nn.Module]


class UnevenMLP(nn.Module):
    """Rows that divide by no world size, and a layer with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class EmptyMLP(UnevenMLP):
    """The same, and parameters without an element: one that is used, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.no_columns = nn.Parameter(torch.empty(5, 0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum() + self.no_columns.sum()


class Block(nn.Module):
    """A pre-norm transformer block; ``inner`` wraps attention and MLP, for checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)
        self.inner: Callable[..., torch.Tensor] = _call

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention by its formula. ``x``: ``[B, T, C]``."""
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))

    def think(self, x: torch.Tensor) -> torch.Tensor:
        """The block's MLP."""
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.inner(self.attend, self.norm_1(x))
        return x + self.inner(self.think, self.norm_2(x))


class TinyTransformer(nn.Module):
    """A byte-sized GPT; ``outer`` wraps each call of a block, for checkpointing."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.outer: Callable[..., torch.Tensor] = _call

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = self.outer(block, x)
        return self.head(self.norm(x))


class NormNet(nn.Module):
    """BatchNorm's buffers, a buffer of its own, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 1)
        self.scale: torch.Tensor
        self.calls: torch.Tensor
        self.register_buffer("scale", torch.tensor([0.5, 1.5, -1.0, 2.0, 1.0]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = self.norm(self.convolution(x.view(-1, 2, 3).repeat(1, 1, 2))).relu().mean(-1)
        return self.last(hidden * self.scale)


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inputs) * 0.3)
        self.up = nn.Parameter(torch.randn(outputs, 2) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def lora_mlp() -> nn.Module:
    """Frozen and trainable parameters in one group, and a group that is frozen altogether."""
    return in_turn(
        first=LoraLinear(6, 9),
        bend=nn.Tanh(),
        frozen=nn.Linear(9, 5).requires_grad_(False),
        bend_again=nn.Tanh(),
        last=LoraLinear(5, 1),
    )


class PartlyUsed(nn.Module):
    """A parameter nobody uses, and a branch of it used only where ``with_branch`` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.branch = nn.Linear(6, 5)
        self.last = nn.Linear(5, 1)
        self.never = nn.Parameter(torch.ones(3, 2))
        self.with_branch = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.with_branch:
            hidden = hidden + self.branch(x)
        return self.last(torch.tanh(hidden))


class ManyDTypes(nn.Module):
    """Trainable parameters in three dtypes, frozen ones in bf16 and int64, all in one group."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.randn(5, 6))
        self.brain = nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))
        self.sixteen = nn.Parameter(torch.randn(1, 3).to(torch.float16))
        self.frozen = nn.Parameter(torch.randn(3).to(torch.bfloat16), requires_grad=False)
        self.permutation = nn.Parameter(torch.tensor([4, 2, 0, 1, 3]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.single.t())[:, self.permutation]
        x = torch.tanh(x.to(torch.bfloat16) @ self.brain.t() + self.frozen)
        return (x.to(torch.float16) @ self.sixteen.t()).float()


def twice() -> nn.Module:
    """One layer called twice in one forward."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(m.again(torch.tanh(m.first(x))))
        return m.last(torch.tanh(m.again(hidden)))

    first, again, last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 1)
    return Assembled(run, first=first, again=again, last=last)


def _call(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    return function(*args)


# -- data -----------------------------------------------------------------------------------------


def regression(index: int, dtype: torch.dtype) -> Batch:
    """Batch ``index``: inputs ``[ROWS, 6]`` and targets ``[ROWS, 1]``."""
    generator = torch.Generator().manual_seed(1000 + index)
    draw = torch.randn(ROWS, 7, generator=generator, dtype=torch.float64)
    return draw[:, :6].to(dtype), draw[:, 6:].to(dtype)


def tokens(index: int, dtype: torch.dtype) -> Batch:
    """Batch ``index``: token ids ``[ROWS, LENGTH]`` and the ids that follow them."""
    generator = torch.Generator().manual_seed(2000 + index)
    draw = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return draw[:, :-1], draw[:, 1:]


def _squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.to(target.dtype), target)


def _cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    wide = output if output.dtype == torch.float64 else output.float()
    return F.cross_entropy(wide.flatten(0, 1), target.flatten())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is tried.

    Attributes:
        make: the model, drawn from torch's seed.
        units: modules, or lists of them, that are groups of their own; the rest is the root's.
        batch: a whole batch by its number, floating-point tensors in a dtype.
        loss: the mean over the rows that it is given.
    """

    make: Callable[[], nn.Module]
    units: tuple[str, ...]
    batch: Callable[[int, torch.dtype], Batch] = regression
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _squared_error

    def units_of(self, model: nn.Module) -> list[Unit]:
        """The units of ``model``; names joined by ``+`` are one list."""
        units: list[Unit] = []
        for names in self.units:
            modules = [model.get_submodule(name) for name in names.split("+")]
            units.append(modules if len(modules) > 1 else modules[0])
        return units


def build(case: Case, dtype: torch.dtype | None = torch.float32) -> nn.Module:
    """The model of ``case``, the same at every call and on every rank; None leaves its dtypes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = case.make()
    return model if dtype is None else model.to(dtype)


_BLOCKS = ("blocks.0", "blocks.1")

CASES: dict[str, Case] = {
    "uneven": Case(make=UnevenMLP, units=("first", "second", "last")),
    "empty": Case(make=EmptyMLP, units=("first", "last")),
    "one-group": Case(make=EmptyMLP, units=()),
    "uneven-list": Case(make=UnevenMLP, units=("first+second",)),
    "transformer": Case(
        make=lambda: TinyTransformer(tied=False),
        units=(*_BLOCKS, "norm+head"),
        batch=tokens,
        loss=_cross_entropy,
    ),
    "transformer-nested": Case(
        make=lambda: TinyTransformer(tied=False),
        units=("blocks.0.qkv", "blocks.0.up", *_BLOCKS, "embedding"),
        batch=tokens,
        loss=_cross_entropy,
    ),
    "tied-in-a-group": Case(
        make=lambda: TinyTransformer(tied=True),
        units=_BLOCKS,
        batch=tokens,
        loss=_cross_entropy,
    ),
    "tied-across-groups": Case(
        make=lambda: TinyTransformer(tied=True),
        units=("embedding", *_BLOCKS),
        batch=tokens,
        loss=_cross_entropy,
    ),
    "batch-norm": Case(make=NormNet, units=("convolution", "norm")),
    "lora": Case(make=lora_mlp, units=("first", "frozen", "last")),
    "partly-used": Case(make=PartlyUsed, units=()),
    "many-dtypes": Case(make=ManyDTypes, units=()),
    "twice": Case(make=twice, units=("first", "again")),
}
