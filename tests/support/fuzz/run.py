"""Carries out a `FuzzCase` on every rank, beside the unsharded model, and compares each step.

The unsharded model sees, one after the other, what every rank sees, and gets the mean of the ranks'
gradients: that is what right means, see ``parity_reference``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fullshard.policies import DepthPrefetch
from fullshard.sharding import FSDPModule, clip_grad_norm_, fully_shard
from support.fuzz.around import NOTHING, Around, draw_around
from support.fuzz.case import Checkpointing, FuzzCase, NodeCase, StepCase, draw
from support.parity.compare import Tolerance, assert_equal, full
from support.ranks import cpu_mesh

WIDTH, BATCH = 4, 3
LARGEST_NORM_ERROR = 64  # eps


class Leaf(nn.Module):
    """``x + scale * down(tanh(up(x)))``."""

    def __init__(self, case: NodeCase) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, case.rows)
        self.down = nn.Linear(case.rows, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5)) if case.scale else None
        self.up.requires_grad_(not case.frozen)

    def forward(self, x: torch.Tensor, skips: int) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return x + (out if self.scale is None else self.scale * out)


class Node(nn.Module):
    """Runs its children in order, as their cases say."""

    def __init__(self, case: NodeCase | FuzzCase, leaves: list[tuple[NodeCase, Leaf]]) -> None:
        super().__init__()
        self.cases = case.nodes if isinstance(case, FuzzCase) else case.children
        self.parts = nn.ModuleList(_build(child, leaves) for child in self.cases)

    def forward(self, x: torch.Tensor, skips: int) -> torch.Tensor:
        for index, (case, part) in enumerate(zip(self.cases, self.parts, strict=True)):
            if case.skipped and (skips + index) % 2:
                continue
            for _ in range(1 + case.repeated):
                x = _call(case, part, x, skips + index)
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

    def forward(self, x: torch.Tensor, skips: int) -> torch.Tensor:
        out: torch.Tensor = self.head(self.tree(self.stem(x), skips))
        return out


def _build(case: NodeCase, leaves: list[tuple[NodeCase, Leaf]]) -> nn.Module:
    if case.children:
        return Node(case, leaves)
    leaf = Leaf(case)
    leaves.append((case, leaf))
    return leaf


def _call(case: NodeCase, module: nn.Module, x: torch.Tensor, skips: int) -> torch.Tensor:
    out: torch.Tensor
    if case.checkpointing is Checkpointing.NONE or not torch.is_grad_enabled():
        out = module(x, skips)
    else:
        reentrant = case.checkpointing is Checkpointing.REENTRANT
        out = checkpoint(module, x, skips, use_reentrant=reentrant)
    return out


def _shard(case: FuzzCase, around: Around) -> Root:
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
    if case.canonical:
        assert isinstance(model, FSDPModule)
        model.set_canonical_order()
    return model


def _placement(dim: int) -> Callable[[nn.Parameter], Shard | None]:
    return lambda param: Shard(dim) if param.ndim > dim else None


def _inputs(case: FuzzCase, rank: int, step: int, micro: int) -> tuple[torch.Tensor, int]:
    """A rank's batch, and what decides which nodes it skips."""
    generator = torch.Generator().manual_seed(hash((case.seed, rank, step, micro)) % 2**31)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, rank + step + micro


def _loss(model: Root, inputs: tuple[torch.Tensor, int]) -> torch.Tensor:
    out: torch.Tensor = model(*inputs)
    return out.square().mean()


def _sharded_step(
    model: Any, case: FuzzCase, step: int, around: Around, optimizer: torch.optim.Optimizer
) -> None:
    plan, rank = case.steps[step], dist.get_rank()
    if plan.by_count:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(torch.tensor(float(case.world_size)))
    micros = range(len(plan.synchronise))
    if plan.forwards_first:
        losses = [_loss(model, _inputs(case, rank, step, micro)) for micro in micros]
    for micro in micros:
        model.set_requires_gradient_sync(plan.synchronise[micro])
        if case.hybrid and not around.case.placements and plan.synchronise[micro]:
            model.set_requires_all_reduce(plan.all_reduce[micro])
        model.set_is_last_backward(plan.waits[micro])
        ready = plan.forwards_first
        loss = losses[micro] if ready else _loss(model, _inputs(case, rank, step, micro))
        last = micro == micros[-1]
        with around.last_backward(optimizer, clipped=not last or plan.max_norm is not None):
            loss.backward()


def _reference_step(model: Root, case: FuzzCase, step: int) -> None:
    for micro in range(len(case.steps[step].synchronise)):
        for rank in range(case.world_size):
            (_loss(model, _inputs(case, rank, step, micro)) / case.world_size).backward()


def _pairs(sharded: Root, plain: Root) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    for (name, mine), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        yield name, mine, theirs


def _compare(
    sharded: Root, plain: Root, tolerance: Tolerance, what: str, *, stepped: bool = False
) -> None:
    pairs = list(_pairs(sharded, plain))
    got = {n: None if a.grad is None else full(a.grad) for n, a, _ in pairs}
    assert_equal(got, {n: b.grad for n, _, b in pairs}, tolerance, f"gradients, {what}")
    if stepped:  # some parameters are, and others are not yet
        return
    got = {n: full(a) for n, a, _ in pairs}
    assert_equal(got, {n: b.detach() for n, _, b in pairs}, tolerance, f"parameters, {what}")


def _optimizer(model: Root, case: FuzzCase) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    if case.adamw:
        return torch.optim.AdamW(params, lr=1e-2, eps=1e-2, weight_decay=0.1)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def _clip(model: Any, plain: Root, plan: StepCase) -> None:
    if plan.max_norm is None:
        return
    norm = clip_grad_norm_(model, plan.max_norm)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), plan.max_norm)
    allowed = LARGEST_NORM_ERROR * torch.finfo(torch.float64).eps * float(wanted)
    assert abs(float(norm) - float(wanted)) <= allowed, f"norm {norm} is not {wanted}"


def run_case(seed: int, around: bool = False) -> None:
    """Trains sharded and unsharded, and raises where they differ.

    Args:
        seed: of the run.
        around: whether other features are drawn to be around it.
    """
    case = draw(seed)
    drawn = draw_around(case) if around else NOTHING
    features = Around(drawn, case)
    with features.run():
        _run(case, features)


def _run(case: FuzzCase, around: Around) -> None:
    sharded, plain = _shard(case, around), Root(case)
    optimizers = [around.wrap(_optimizer(sharded, case), sharded), _optimizer(plain, case)]
    for step, plan in enumerate(case.steps):
        tolerance = Tolerance(units=256 * (step + 1))
        around.before(step, sharded, plain, optimizers)
        if plan.evaluates:
            inputs = _inputs(case, dist.get_rank(), step, 7)
            with torch.no_grad():
                torch.testing.assert_close(_loss(sharded, inputs), _loss(plain, inputs))
        with around.step() as before_update:
            _sharded_step(sharded, case, step, around, optimizers[0])
            _reference_step(plain, case, step)
            stepped = around.case.optimizer == "overlapped"
            _compare(sharded, plain, tolerance, f"step {step}", stepped=stepped)
            _clip(sharded, plain, plan)
            before_update()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        _compare(sharded, plain, tolerance, f"after step {step}")
