"""Features around a training run, drawn at random.

They are: where state lives, what travels in which dtype, who clips, checks, and what comes between
steps and between micro-batches.

Owns ``AroundCase`` and the objects of a sharded run that it names. Their draws are apart from those
of ``FuzzCase``, so that a seed names the same run with and without them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fullshard.insight import IntegrityChecks, IntegrityPolicy
from fullshard.optim import FileTier, HostTier, OffloadedOptimizer, OverlappedStep
from fullshard.policies import CPUOffloadPolicy, FileOffloadPolicy, MixedPrecisionPolicy
from fullshard.sharding import ShardingPlacements
from support.fuzz.case import Checkpointing, FuzzCase, NodeCase
from support.ranks import cpu_mesh

__all__ = [
    "BEFORE",
    "BETWEEN",
    "MORE_BEFORE",
    "MORE_BETWEEN",
    "MOVES",
    "NOTHING",
    "ONE_AXIS",
    "PLACED",
    "TWO_LEVELS",
    "Around",
    "AroundCase",
    "Norm",
    "draw_around",
    "is_reentrant",
]

P = ShardingPlacements
PLACED = {
    "ZeRO-1": P.zero(1),
    "ZeRO-2": P.zero(2),
    "hpZ": P(compute="inner"),
    "inner": P(compute="inner", gradients="inner"),
    "full, inner": P(compute=(), gradients="inner"),
    "inner, none": P(compute="inner", gradients=()),
    "HSDP": P(optimizer="inner"),
    "ZeRO-1 of HSDP": P(compute=(), gradients=(), optimizer="inner"),
}
ONE_AXIS = ("ZeRO-1", "ZeRO-2", "ZeRO-3")
TWO_LEVELS = ("hpZ", "inner", "full, inner", "inner, none")
PLACED["ZeRO-3"] = P.zero(3)

BEFORE = (  # see ``support.fuzz.events``
    "reload",
    "reload the optimizer",
    "write full parameters",
    "write shards",
    "freeze",
    "change the reshard",
    "change placements",
    "fail",
    "evaluate",
    "keep zeros",
)
MOVES = ("", "", "dtensors", "full", "files", "plain", "ours")
BETWEEN = ("", "", "evaluate", "read", "fail", "freeze")
MORE_BEFORE = (*BEFORE, "interrupt", "replace a parameter", "average")
MORE_BETWEEN = (
    *BETWEEN,
    "interrupt",
    "change placements",
    "change the reshard",
    "replace a parameter",
    "average",
)
VARIANTS: tuple[dict[str, bool], ...] = (
    {},
    {"foreach": False},
    {"foreach": True},
    {"fused": True},
    {"amsgrad": True},
)


class Norm(Enum):
    """Whose norm clips, and who clips."""

    BY_HAND = "by hand"
    EXACT = "exact"
    PREVIOUS = "previous"


@dataclass(frozen=True, kw_only=True)
class AroundCase:
    """What is around a run.

    Attributes:
        placements: a key of ``PLACED``; empty: none.
        offload: where shards live: "none", "cpu" or "files".
        gradients_in_file: with "files", whether gradients live there, too.
        optimizer: "plain", "overlapped", "files" or "host".
        norm: "overlapped" may clip by itself, all others by hand.
        max_norm: to which "overlapped" clips.
        mixed: whether the model computes in float32; parameters are in float64.
        reduces_wide: with ``mixed``, whether gradients are reduced in float64.
        checks: whether damaged numbers are looked for.
        watches: whether slow ranks are looked for.
        variant: options of the optimizer that choose its implementation.
        two_groups: whether the optimizer has two groups.
        decays: whether the learning rate falls after each step.
        fills_zeros: whether ``zero_grad`` fills gradients with zeros, else frees them.
        overlaps: for each step, whether "overlapped" steps beside backward.
        before: what comes before each step.
        moves: how state moves into another run, before each step; empty: it does not.
        moved: what is around the run to which state moves, before each step.
        between: for each step, what comes before each micro-batch but the first.
        at_rest: whether nothing else changes shards between steps.
    """

    placements: str = ""
    offload: str = "none"
    gradients_in_file: bool = False
    optimizer: str = "plain"
    norm: Norm = Norm.BY_HAND
    max_norm: float = 0.5
    mixed: bool = False
    reduces_wide: bool = False
    checks: bool = False
    watches: bool = False
    variant: dict[str, bool] = field(default_factory=dict)
    two_groups: bool = False
    decays: bool = False
    fills_zeros: bool = False
    overlaps: tuple[bool, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    moves: tuple[str, ...] = ()
    moved: tuple[AroundCase, ...] = ()
    between: tuple[tuple[str, ...], ...] = ()
    at_rest: bool = True


NOTHING = AroundCase()


def draw_around(case: FuzzCase) -> AroundCase:
    """Draw what is around a run."""
    rng = random.Random(f"around {case.seed}")
    found = AroundCase(
        **_places(rng, case),
        checks=rng.random() < 0.3,
        watches=rng.random() < 0.3,
        before=tuple(tuple(rng.sample(BEFORE, rng.randint(0, 2))) for _ in case.steps),
    )
    rng = random.Random(f"around {case.seed}, beside")
    between = [[rng.choice(BETWEEN) for _ in step.synchronise[1:]] for step in case.steps]
    for events, step in zip(between, case.steps, strict=True):
        if step.forwards_first:  # of which graphs are alive, and parameters may be full
            events[:] = [event if event == "evaluate" else "" for event in events]
    mixed = rng.random() < 0.3
    found = replace(
        found,
        **_more_places(rng, found.offload, found.optimizer),
        max_norm=rng.choice([0.1, 0.5, 10.0]),
        mixed=mixed,
        reduces_wide=mixed and rng.random() < 0.5,
        variant=rng.choice(VARIANTS),
        two_groups=rng.random() < 0.3,
        decays=rng.random() < 0.3,
        fills_zeros=rng.random() < 0.2,
        overlaps=tuple(rng.random() < 0.85 for _ in case.steps),
        moves=tuple(rng.choice(MOVES) for _ in case.steps),
        between=tuple(map(tuple, between)),
    )
    moved = []
    for _ in case.steps:
        places = _places(rng, case)
        more = _more_places(rng, places["offload"], places["optimizer"])
        moved.append(replace(found, **places, **more))
    return replace(found, moved=tuple(moved))


def _places(rng: random.Random, case: FuzzCase) -> dict[str, Any]:
    known = [*PLACED, *TWO_LEVELS] if case.world_size == 4 else [*ONE_AXIS]
    if case.canonical:  # in which ranks keep no full parameters
        known = [name for name in known if PLACED[name].compute != ()]
    wrapped = ["plain", "files", "host"]
    if not any(is_reentrant(node) for node in case.nodes):  # which may reduce a group twice
        wrapped += ["overlapped"] * 2
    return {
        "placements": rng.choice(["", *known]),
        "offload": rng.choice(["none", "cpu", "files"]),
        "optimizer": rng.choice(wrapped),
    }


def _more_places(rng: random.Random, offload: str, optimizer: str) -> dict[str, Any]:
    norm = rng.choice([*Norm])
    return {
        "gradients_in_file": offload == "files" and rng.random() < 0.6,
        "norm": norm if optimizer == "overlapped" else Norm.BY_HAND,
    }


def is_reentrant(node: NodeCase) -> bool:
    """Whether the node, or one in it, runs under reentrant checkpointing."""
    return node.checkpointing is Checkpointing.REENTRANT or any(map(is_reentrant, node.children))


class Around:
    """The objects that an ``AroundCase`` names, for one sharded model."""

    def __init__(self, case: AroundCase, run: FuzzCase, folder: Path) -> None:
        self.case, self.canonical = case, run.canonical
        self.has_replicas = run.hybrid and not case.placements
        self._world_size, self._folder = run.world_size, folder
        self._checks: IntegrityChecks | None = None

    def _mesh(self) -> DeviceMesh:
        if self._world_size == 4:
            return cpu_mesh((2, 2), ("outer", "inner"))
        return cpu_mesh((self._world_size,), ("inner",))

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``fully_shard``."""
        case, found = self.case, dict[str, Any]()
        if case.offload == "cpu":
            found["offload_policy"] = CPUOffloadPolicy()
        if case.offload == "files":
            found["offload_policy"] = FileOffloadPolicy(
                self._folder,
                resident_mb=0.01,
                read_ahead_mb=0.005,
                min_bytes=1,
                gradients=case.gradients_in_file,
            )
        if case.placements:
            found |= {"mesh": self._mesh(), "placements": PLACED[case.placements]}
        if case.mixed:
            wide = torch.float64 if case.reduces_wide else None
            found["mp_policy"] = MixedPrecisionPolicy(torch.float32, reduce_dtype=wide)
        return found

    def wrap(self, optimizer: Optimizer, model: Any) -> Optimizer:
        """Return the optimizer of the sharded model, wrapped; begin what watches it."""
        case = self.case
        if case.optimizer == "overlapped":
            clips: dict[str, Any] = {}
            if case.norm is not Norm.BY_HAND:
                clips = {"max_norm": case.max_norm, "norm": case.norm.value}
            optimizer = OverlappedStep(optimizer, model, **clips)
        if case.optimizer == "files":
            tier = FileTier(self._folder, bucket_mb=1e-4, min_bytes=1)
            optimizer = OffloadedOptimizer(optimizer, tier)
        if case.optimizer == "host":
            optimizer = OffloadedOptimizer(optimizer, HostTier(bucket_mb=1e-4, min_bytes=1))
        if case.checks:
            # what comes between steps changes shards
            at_rest = case.at_rest and not any(case.before) and not any(case.moves)
            policy = IntegrityPolicy(every=2, at_rest=at_rest)
            self._checks = IntegrityChecks(model, optimizer, policy)
        return optimizer

    def last_backward(
        self, optimizer: Optimizer, step: int, clipped: bool
    ) -> AbstractContextManager[None]:
        """Return the block around the last backward of a step.

        Args:
            optimizer: of the sharded model.
            step: the number of the step.
            clipped: whether the program clips by hand.
        """
        overlaps = self.case.overlaps[step] if self.case.overlaps else True
        by_hand = clipped and self.case.norm is Norm.BY_HAND
        if isinstance(optimizer, OverlappedStep) and overlaps and not by_hand:
            return optimizer.overlap()
        return nullcontext()

    @contextmanager
    def step(self) -> Iterator[Callable[[], None]]:
        """Surround a step; call what it yields before the optimizer's."""
        if self._checks is None:
            yield lambda: None
            return
        self._checks.begin()
        yield self._checks.before_update
        self._checks.end()
