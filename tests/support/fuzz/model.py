"""The model of a run: sharded as its case says, and as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fullshard.policies import CanonicalOrder, DepthPrefetch
from fullshard.sharding import FSDPModule, fully_shard
from support.fuzz.around import Around, AroundCase
from support.fuzz.carried import HEAD, STEM, collect, read, require_one, write
from support.fuzz.case import Checkpointing, FuzzCase, NodeCase
from support.ranks import cpu_mesh

__all__ = ["Leaf", "Node", "Root", "inputs_of", "optimizer_of", "sharded"]

WIDTH, BATCH = 4, 3


class Leaf(nn.Module):
    """``x + scale * down(tanh(up(x)))``."""

    def __init__(self, case: NodeCase, number: int) -> None:
        super().__init__()
        self.number = number
        self.up = nn.Linear(WIDTH, case.rows)
        self.down = nn.Linear(case.rows, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5)) if case.scale else None
        self.up.requires_grad_(not case.frozen)

    def forward(self, x: torch.Tensor, skips: int, *given: Any, **named: Any) -> torch.Tensor:
        require_one(x, *given, **named)
        known = read(x, *given, **named)
        out: torch.Tensor = self.down(torch.tanh(self.up(known)))
        early = collect(x, out, self.number, *given, **named)
        y = known + (out if self.scale is None else self.scale * out)
        late = collect(x, y, self.number, *given, **named) if "late" in named else early
        write(y, self.number, late, *given, **named)
        return y


class Node(nn.Module):
    """Runs its children in order, as their cases say."""

    def __init__(self, case: NodeCase | FuzzCase, leaves: list[tuple[NodeCase, Leaf]]) -> None:
        super().__init__()
        self.cases = case.nodes if isinstance(case, FuzzCase) else case.children
        self.parts = nn.ModuleList(_build(child, leaves) for child in self.cases)

    def forward(self, x: torch.Tensor, skips: int, *given: Any, **named: Any) -> torch.Tensor:
        require_one(x, *given, **named)
        for index, (case, part) in enumerate(zip(self.cases, self.parts, strict=True)):
            if case.skipped and (skips + index) % 2:
                continue
            for _ in range(1 + case.repeated):
                if "context" in named:
                    named["context"] = x
                x = _call(case, part, x, skips + index, *given, **named)
        return x


class Root(nn.Module):
    """A stem, so that gradients reach the inputs of all else, the tree, and a head."""

    def __init__(self, case: FuzzCase) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        leaves: list[tuple[NodeCase, Leaf]] = []
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.tree = Node(case, leaves)
        self.head = nn.Linear(WIDTH, 2)
        self.unused = nn.Linear(2, 3)
        for node, leaf in leaves:
            other = leaves[node.tied][1] if node.tied >= 0 else leaf
            if other.up.weight.shape == leaf.up.weight.shape:
                leaf.up.weight = other.up.weight
        self.double()

    def forward(self, x: torch.Tensor, skips: int, *given: Any, **named: Any) -> torch.Tensor:
        require_one(x, *given, **named)
        first = self.stem(read(x, *given, **named))
        write(first, STEM, collect(x, first, STEM, *given, **named), *given, **named)
        if "context" in named:
            named["context"] = first
        last = self.tree(first, skips, *given, **named)
        out: torch.Tensor = self.head(last)
        write(out, HEAD, collect(last, out, HEAD, *given, **named), *given, **named)
        return out


def _build(case: NodeCase, leaves: list[tuple[NodeCase, Leaf]]) -> nn.Module:
    if case.children:
        return Node(case, leaves)
    leaf = Leaf(case, len(leaves))
    leaves.append((case, leaf))
    return leaf


def _call(
    case: NodeCase, module: nn.Module, x: torch.Tensor, skips: int, *given: Any, **named: Any
) -> torch.Tensor:
    call = partial(module, **named)  # reentrant checkpointing takes no keyword arguments
    out: torch.Tensor
    if case.checkpointing is Checkpointing.NONE or not torch.is_grad_enabled():
        out = call(x, skips, *given)
    else:
        reentrant = case.checkpointing is Checkpointing.REENTRANT
        out = checkpoint(call, x, skips, *given, use_reentrant=reentrant)
    return out


def sharded(case: FuzzCase, around: Around) -> Any:
    """Return the model with its modules sharded."""
    model = Root(case)
    mesh = cpu_mesh((2, 2), ("replicate", "shard")) if case.hybrid else cpu_mesh()
    options: dict[str, Any] = {
        "mesh": mesh,
        "prefetch_policy": DepthPrefetch(backward=case.prefetch),
        **around.options(),
    }
    placed = bool(around.case.placements)  # which an int would contradict

    def walk(node: Node) -> None:
        for each, part in zip(node.cases, node.parts, strict=True):
            if isinstance(part, Node):
                walk(part)
            if each.sharded:
                fully_shard(
                    part,
                    reshard_after_forward=True if placed and each.reshard == 2 else each.reshard,
                    shard_placement_fn=_placement(each.dim),
                    **options,
                )

    walk(model.tree)
    fully_shard(model, reshard_after_forward=case.root_reshard, **options)
    assert isinstance(model, FSDPModule)
    if case.canonical:
        model.set_schedule(CanonicalOrder())
    return model


def _placement(dim: int) -> Callable[[nn.Parameter], Shard | None]:
    return lambda param: Shard(dim) if param.ndim > dim else None


def inputs_of(case: FuzzCase, rank: int, step: int, micro: int) -> tuple[torch.Tensor, int]:
    """Return a rank's batch, and what decides which nodes it skips."""
    generator = torch.Generator().manual_seed(hash((case.seed, rank, step, micro)) % 2**31)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, rank + step + micro


def optimizer_of(model: Root, case: FuzzCase, around: AroundCase) -> torch.optim.Optimizer:
    """Return an optimizer of the parameters that are not frozen by the case."""
    params = [param for param in model.parameters() if param.requires_grad]
    rate = 1e-2 if case.adamw else 0.05
    groups: Any = params
    options: dict[str, Any] = dict(around.variant)
    if around.two_groups:
        groups = [{"params": params[::2]}, {"params": params[1::2], "lr": rate / 2}]
    if case.adamw:
        return torch.optim.AdamW(groups, lr=rate, eps=1e-2, weight_decay=0.1, **options)
    for name in ("amsgrad", "fused"):  # torch's fused one needs all momenta, or none
        options.pop(name, None)
    return torch.optim.SGD(groups, lr=rate, momentum=0.9, **options)
