"""Faults in numbers, at every stage of a step, and the checks that have to find them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from fullshard.insight import DamagedNumbersError, IntegrityChecks, IntegrityPolicy
from fullshard.insight.integrity.collectives import (
    CheckedAllGather,
    CheckedReduceScatter,
    Parts,
)
from fullshard.sharding import fully_shard
from fullshard.sharding.spi import local_shard

__all__ = [
    "FAULT",
    "STAGES",
    "DamagedAllGather",
    "DamagedReduceScatter",
    "Outcome",
    "damageable",
    "run_campaign",
    "strike_at_rest",
]

STAGES = {
    "shards at rest": "shard",
    "optimizer state at rest": "optimizer state",
    "packed shards": "gather",
    "gathered parameters": "gather",
    "computed gradients": "gradient",
    "packed gradients": "reduction",
    "arrived gradients": "reduction",
    "sums of gradients": "sum",
}
"""Where a fault strikes, and the stage that a finding has to name."""


@dataclass
class Outcome:
    """What a campaign found, by stage.

    Attributes:
        struck: faults that changed a bit.
        found: those that the next check found, with the right stage, rank and tensor.
        missed: descriptions of the others.
        comparisons: without a fault, on all ranks.
        false_alarms: of those.
    """

    struck: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    comparisons: int = 0
    false_alarms: int = 0


@dataclass
class _Fault:
    """The fault of this trial, on the rank that it strikes; one strike."""

    stage: str = ""
    rank: int = -1
    tensor: str = ""
    seed: int = 0
    done: bool = False

    def strike(self, stage: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Change bits of the tensor if it is there, this is the rank, and now is the stage."""
        if self.done or stage != self.stage or dist.get_rank() != self.rank:
            return
        for name, tensor in tensors:
            if name == self.tensor and tensor.numel():
                damage(tensor, random.Random(self.seed))
                self.done = True
                return


FAULT = _Fault()


def damage(tensor: torch.Tensor, generator: random.Random) -> None:
    """Flip a bit of one element, or swap two unequal elements, of a contiguous tensor."""
    size = tensor.element_size()
    octets = tensor.detach().view(-1).view(torch.uint8).view(-1, size)
    rows = len(octets)
    if rows > 1 and generator.random() < 0.3:
        first, second = generator.sample(range(rows), 2)
        if not torch.equal(octets[first], octets[second]):
            kept = octets[first].clone()
            octets[first] = octets[second]
            octets[second] = kept
            return
    octets[generator.randrange(rows), generator.randrange(size)] ^= 1 << generator.randrange(8)


def _named(known: Parts, piece: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    assert known.numel == piece.numel(), "a finding would name no parameter"
    return list(zip(known.names, known.of(piece), strict=True))


class DamagedAllGather(CheckedAllGather):
    """Damages what it sends, or what arrived, before the comparison."""

    def _gather(self, output: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        FAULT.strike("packed shards", _named(self.known, own))
        super()._gather(output, own, group)
        for piece in output.view(group.size(), -1):
            FAULT.strike("gathered parameters", _named(self.known, piece))


class DamagedReduceScatter(CheckedReduceScatter):
    """Damages what it sends, what arrived, or the sum."""

    def _exchange(self, arrived: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
        for piece in sent.view(group.size(), -1):
            FAULT.strike("packed gradients", _named(self.known, piece))
        super()._exchange(arrived, sent, group)
        for piece in arrived.view(group.size(), -1):
            FAULT.strike("arrived gradients", _named(self.known, piece))

    def _add(self, pieces: Sequence[torch.Tensor], output: torch.Tensor, averages: bool) -> None:
        super()._add(pieces, output, averages)
        FAULT.strike("sums of gradients", _named(self.known, output))


@torch.no_grad()
def strike_at_rest(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Strike what rests between steps."""
    params = list(model.named_parameters())
    states = [(name, local_shard(optimizer.state[param]["exp_avg"])) for name, param in params]
    FAULT.strike("shards at rest", [(name, local_shard(param)) for name, param in params])
    FAULT.strike("optimizer state at rest", states)


class _Trial:
    """A small model whose state is put back before each trial."""

    def __init__(self, mesh: DeviceMesh, *, width: int = 16) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 3)
        )
        for module in (self.model[0], self.model[2], self.model):
            fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.inputs = torch.randn(
            4, width, generator=torch.Generator().manual_seed(dist.get_rank())
        )
        self.step(None)
        self._kept = [tensor.clone() for _, tensor in self._all()]

    def _all(self) -> list[tuple[str, torch.Tensor]]:
        found = []
        for name, param in self.model.named_parameters():
            state = self.optimizer.state[param]
            found.append((name, local_shard(param)))
            found += [(name, local_shard(state[key])) for key in ("exp_avg", "exp_avg_sq")]
        return found

    def put_back(self) -> None:
        with torch.no_grad():
            for (_, tensor), kept in zip(self._all(), self._kept, strict=True):
                tensor.copy_(kept)
            for param in self.model.parameters():
                self.optimizer.state[param]["step"].fill_(1)
        self.optimizer.zero_grad()

    def step(self, checks: IntegrityChecks | None, *, twice: bool = False) -> None:
        if checks is None:
            self._compute()
        else:
            checks.begin()
            if twice:
                checks.twice(self._compute)
            else:
                self._compute()
            checks.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if checks is not None:
            checks.end()

    def _compute(self) -> None:
        loss = functional.cross_entropy(self.model(self.inputs), torch.tensor([0, 1, 2, 0]))
        loss.backward()

    def checks(self) -> IntegrityChecks:
        checks = IntegrityChecks(self.model, self.optimizer, IntegrityPolicy(every=1))
        checks.all_gather, checks.reduce_scatter = DamagedAllGather, DamagedReduceScatter
        return checks


class _DamagedBackward(torch.autograd.Function):
    """The identity, which damages a parameter on its way into a computation, and its gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        own = gradient.clone(memory_format=torch.contiguous_format)
        FAULT.strike("computed gradients", [(ctx.name, own)])
        return own, None


def damageable(model: nn.Module, prefix: str = "") -> None:
    """Let gradients of weights pass through code that may damage them."""
    for name, module in model.named_children():

        def forward(
            values: torch.Tensor, module: nn.Module = module, name: str = f"{prefix}{name}"
        ) -> torch.Tensor:
            through: Any = _DamagedBackward.apply
            weight = through(module.weight, f"{name}.weight")
            bias = through(module.bias, f"{name}.bias")
            if isinstance(module, nn.Linear):
                return functional.linear(values, weight, bias)
            assert isinstance(module, nn.LayerNorm)
            return functional.layer_norm(values, module.normalized_shape, weight, bias)

        module.forward = forward


def run_campaign(mesh: DeviceMesh, *, faults: int, clean: int, seed: int) -> Outcome:
    """Strike ``faults`` times, at every stage in turn, and make ``clean`` comparisons or more."""
    trial, outcome = _Trial(mesh), Outcome()
    damageable(trial.model)
    generator = random.Random(seed)
    for number in range(faults):
        stage = list(STAGES)[number % len(STAGES)]
        FAULT.__init__(  # type: ignore[misc]  # a new fault in the place of the last one
            stage=stage,
            rank=generator.randrange(dist.get_world_size()),
            tensor=generator.choice(trial.names),
            seed=generator.randrange(1 << 30),
        )
        trial.put_back()
        checks = trial.checks()
        told: tuple[Any, ...] = ()
        try:
            if "rest" in stage:
                rank, FAULT.rank = FAULT.rank, -1
                trial.step(checks)
                FAULT.rank = rank
                strike_at_rest(trial.model, trial.optimizer)
            trial.step(checks, twice=stage == "computed gradients")
        except DamagedNumbersError as error:
            told = error.findings
        struck = torch.tensor([int(FAULT.done)])
        dist.all_reduce(struck, op=dist.ReduceOp.MAX)
        if not struck:
            continue  # this rank has no element of the tensor
        outcome.struck[stage] += 1
        right = any(
            each.stage == STAGES[stage] and FAULT.rank in each.ranks and each.tensor == FAULT.tensor
            for each in told
        )
        outcome.found[stage] += right
        if not right:
            outcome.missed.append(f"{FAULT}: {[str(each) for each in told]}")
        trial.optimizer.zero_grad()
    FAULT.__init__()  # type: ignore[misc]  # no fault
    trial.put_back()
    checks = trial.checks()
    while checks.comparisons < clean:
        try:
            trial.step(checks, twice=True)
        except DamagedNumbersError:
            outcome.false_alarms += 1
    outcome.comparisons = checks.comparisons
    return outcome


def cost_of_a_step(mesh: DeviceMesh, *, width: int, rounds: int) -> dict[str, float]:
    """Seconds of a step, by what is checked in it; the median of ``rounds`` steps."""
    found: dict[str, float] = {}
    trial = _Trial(mesh, width=width)
    nothing = {"collectives": False, "at_rest": False, "replicas": False}
    ways = {
        "no checks": nothing,
        "collectives": {**nothing, "collectives": True},
        "at rest": {**nothing, "at_rest": True},
        "all": {},
        "all, computed twice": {},
    }
    for name, options in ways.items():
        policy = IntegrityPolicy(every=1, **options)
        checks = IntegrityChecks(trial.model, trial.optimizer, policy)
        times = []
        for _ in range(rounds + 1):
            dist.barrier()
            began = time.perf_counter()
            trial.step(checks, twice=name.endswith("twice"))
            times.append(time.perf_counter() - began)
        found[name] = sorted(times[1:])[rounds // 2]
    return found
