"""Features around a training run, drawn at random.

They are: where state lives, checks, and what comes between steps.

Owns ``AroundCase``: placements, offload, the optimizer's wrapper, checks and watches, and what a
user's program does before each step. Their draws are apart from those of ``FuzzCase``, so that a
seed names the same run with and without them.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fullshard.elastic import IntegrityChecks, IntegrityPolicy
from fullshard.optim import FileTier, HostTier, OffloadedOptimizer, OverlappedStep
from fullshard.policies import CPUOffloadPolicy, FileOffloadPolicy
from fullshard.sharding import FSDPModule, ShardingPlacements, SlowRanks, unsharded
from support.fuzz.case import Checkpointing, FuzzCase, NodeCase
from support.ranks import cpu_mesh

__all__ = ["NOTHING", "PLACED", "Around", "AroundCase", "draw_around"]

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


@dataclass(frozen=True, kw_only=True)
class AroundCase:
    """What is around a run.

    Attributes:
        placements: a key of ``PLACED``; empty: none.
        offload: where shards live: "none", "cpu" or "files".
        optimizer: "plain", "overlapped", "files" or "host".
        checks: whether damaged numbers are looked for.
        watches: whether slow ranks are looked for.
        before: names of ``_EVENTS``, for each step.
    """

    placements: str = ""
    offload: str = "none"
    optimizer: str = "plain"
    checks: bool = False
    watches: bool = False
    before: tuple[tuple[str, ...], ...] = ()


NOTHING = AroundCase()


def draw_around(case: FuzzCase) -> AroundCase:
    """Draw what is around a run."""
    rng = random.Random(f"around {case.seed}")
    known = [*PLACED] if case.world_size == 4 else [*ONE_AXIS]
    if case.canonical:  # in which ranks keep no full parameters
        known = [name for name in known if PLACED[name].compute != ()]
    wrapped = ["plain", "files", "host"]
    if not any(_is_reentrant(node) for node in case.nodes):  # which may reduce a group twice
        wrapped.append("overlapped")
    return AroundCase(
        placements=rng.choice(["", *known]),
        offload=rng.choice(["none", "cpu", "files"]),
        optimizer=rng.choice(wrapped),
        checks=rng.random() < 0.3,
        watches=rng.random() < 0.3,
        before=tuple(tuple(rng.sample([*_EVENTS], rng.randint(0, 2))) for _ in case.steps),
    )


def _is_reentrant(node: NodeCase) -> bool:
    return node.checkpointing is Checkpointing.REENTRANT or any(map(_is_reentrant, node.children))


class Around:
    """Carries out an ``AroundCase``, beside the unsharded model."""

    def __init__(self, case: AroundCase, run: FuzzCase) -> None:
        self.case, self.rng = case, random.Random(f"events {run.seed}")
        self.canonical, self._world_size = run.canonical, run.world_size
        self._folder = tempfile.TemporaryDirectory(prefix="fullshard-fuzz-")
        self._checks: IntegrityChecks | None = None
        self._watch = SlowRanks() if case.watches else None
        self.offload = self._offload()

    def mesh(self) -> DeviceMesh | None:
        """Return the mesh of the placements; None: they have none."""
        if not self.case.placements:
            return None
        if self._world_size == 4:
            return cpu_mesh((2, 2), ("outer", "inner"))
        return cpu_mesh((self._world_size,), ("inner",))

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``fully_shard``."""
        found: dict[str, Any] = {}
        if self.offload is not None:
            found["offload_policy"] = self.offload
        if self.case.placements:
            found |= {"mesh": self.mesh(), "placements": PLACED[self.case.placements]}
        return found

    def _offload(self) -> Any:
        if self.case.offload == "cpu":
            return CPUOffloadPolicy()
        if self.case.offload == "files":
            return FileOffloadPolicy(
                Path(self._folder.name), resident_mb=0.01, read_ahead_mb=0.005, min_bytes=1
            )
        return None

    def wrap(self, optimizer: Optimizer, model: Any) -> Optimizer:
        """Return the optimizer of the sharded model, wrapped; begin what watches it."""
        if self.case.optimizer == "overlapped":
            optimizer = OverlappedStep(optimizer, model)
        if self.case.optimizer == "files":
            tier = FileTier(Path(self._folder.name), bucket_mb=1e-4, min_bytes=1)
            optimizer = OffloadedOptimizer(optimizer, tier)
        if self.case.optimizer == "host":
            optimizer = OffloadedOptimizer(optimizer, HostTier(bucket_mb=1e-4, min_bytes=1))
        if self.case.checks:
            # what comes between steps changes shards
            policy = IntegrityPolicy(every=2, at_rest=not any(self.case.before))
            self._checks = IntegrityChecks(model, optimizer, policy)
        return optimizer

    def last_backward(self, optimizer: Optimizer, clipped: bool) -> AbstractContextManager[None]:
        """Return the block around the last backward of a step."""
        if isinstance(optimizer, OverlappedStep) and not clipped:
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

    @contextmanager
    def run(self) -> Iterator[None]:
        """Surround the whole run."""
        with self._folder, self._watch or nullcontext():
            yield
            if self._watch is not None:
                self._watch.report()

    def before(self, step: int, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
        """Do what the program does before a step, to both models."""
        for name in self.case.before[step] if self.case.before else ():
            _EVENTS[name](self, model, plain, optimizers)


# -- what comes between steps: each of them changes both models alike ------------------------------


def _pick(around: Around, plain: nn.Module) -> str:
    return around.rng.choice([name for name, _ in plain.named_parameters()])


def _reload(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Save a state dict, damage the model and load it again."""
    some = StateDictOptions(strict=False)  # of what is not used, there is no state
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        saved = copy.deepcopy(get_state_dict(each, optimizer))
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(0).add_(7)
        model_state, optim_state = saved
        set_state_dict(
            each,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optim_state,
            options=some,
        )


def _reload_optimizer(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Load the optimizer's own state dict."""
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))


def _write_full(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Change full parameters."""
    name = _pick(around, plain)
    with unsharded(model, writeback=True):
        _change(model, name)
    _change(plain, name)


def _write_shards(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Change shards."""
    name = _pick(around, plain)
    _change(model, name)
    _change(plain, name)


def _change(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).mul_(0.5)


def _freeze(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Freeze a parameter, or train one that was frozen by this."""
    name = _pick(around, plain)
    for each in (model, plain):
        param = each.get_parameter(name)
        if any(
            param is one
            for group in optimizers[each is plain].param_groups
            for one in group["params"]
        ):
            param.requires_grad_(not param.requires_grad)


def _change_reshard(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Change whether parameters are freed after forward."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_reshard_after_forward(around.rng.random() < 0.5, recurse=False)


def _change_placements(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Change placements to those with the same shards."""
    for family in (ONE_AXIS, TWO_LEVELS):
        if around.case.placements in family:
            chosen = PLACED[around.rng.choice(family)]
            if not (around.canonical and chosen.compute == ()):
                model.set_placements(chosen)


def _fail(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Raise in a forward, or in a backward, on all ranks; drop the gradients.

    In the canonical order ranks raise in different modules, and a forward follows.
    """
    part = around.rng.choice([name for name, _ in plain.named_modules() if name])
    if around.canonical:
        part = ("stem", "tree", "head")[(len(part) + dist.get_rank()) % 3]
    backward = around.rng.random() < 0.5

    def fail(*_: Any) -> None:
        raise _PlannedError

    def fail_in_backward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(fail)

    x, hook = torch.ones(3, 4, dtype=torch.float64), fail_in_backward if backward else fail
    handle = model.get_submodule(part).register_forward_hook(hook)
    try:
        model(x, 0).sum().backward()
    except _PlannedError:
        pass
    finally:
        handle.remove()
    for optimizer in optimizers:
        optimizer.zero_grad()
    if around.canonical:
        with torch.no_grad():
            model(x, 0)


class _PlannedError(Exception):
    """What ``_fail`` raises."""


def _evaluate(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Compare a forward without gradients, in evaluation mode, with full parameters."""
    x = torch.ones(3, 4, dtype=torch.float64)
    with torch.no_grad(), unsharded(model):
        torch.testing.assert_close(model.eval()(x, 0), plain(x, 0))
    model.train()


def _keep_zeros(around: Around, model: Any, plain: Any, optimizers: list[Optimizer]) -> None:
    """Give all parameters that train gradients of zeros, as a first ``zero_grad`` of some do."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.grad = torch.zeros_like(param)


_EVENTS: dict[str, Callable[[Around, Any, Any, list[Optimizer]], None]] = {
    "reload": _reload,
    "reload the optimizer": _reload_optimizer,
    "write full parameters": _write_full,
    "write shards": _write_shards,
    "freeze": _freeze,
    "change the reshard": _change_reshard,
    "change placements": _change_placements,
    "fail": _fail,
    "evaluate": _evaluate,
    "keep zeros": _keep_zeros,
}
