"""`--plan` and `--budget`: the planned memory of a run, and the measured memory.

Turns the run's task and config into a `fullshard.preflight.plan`. The plan runs in a separate
process, because this process is in a process group; and what `--budget` may change.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.preflight import Plan, PlanError, plan
from fullshard.preflight.spi import Ledger, Places
from fullshard.sharding import FSDPModule
from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import Share
from fullshard_train.settings.config import Config
from fullshard_train.task import Task
from fullshard_train.tasks import build_model
from fullshard_train.training.measures import described
from fullshard_train.training.optim import build_optimizer
from fullshard_train.training.sharded import announce, shard_model
from fullshard_train.training.trainer import cross_entropy

__all__ = ["Planned", "Watched", "plan_run"]

Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A config and what it needs: the one that was asked for, or one that fits the budget."""

    config: Config
    plan: Plan

    def __str__(self) -> str:
        """The plan, and the settings that a budget may have changed, in one line each."""
        train, parallel = self.config.train, self.config.parallel
        frees = parallel.zero == 3 and parallel.reshard_after_forward
        kept = f"parameters {'freed' if frees else 'kept'} after forward"
        words = f"ZeRO-{parallel.zero}, train.accumulate {train.accumulate}, {kept}"
        return f"{words}\n{self.plan}"


def plan_run(
    task: Task, config: Config, *, ranks: int, device: torch.device, budget: int | None
) -> Planned:
    """The plan of a config; with a budget, of the first that fits; called on one rank alone.

    A budget may only change choices that keep the mathematics: full parameters are freed after
    forward, and a batch is cut into more micro-batches.

    Raises:
        TrainError: if nothing fits, or the model cannot be planned.
    """
    context = multiprocessing.get_context("spawn")
    least, layers = None, _layers_of(task)
    with ProcessPoolExecutor(1, mp_context=context) as alone:
        for candidate in _candidates(config, ranks) if budget is not None else [config]:
            # The rank with most rows: the last one.
            share = Share(index=ranks - 1, count=ranks)
            rows = share.rows(candidate.train.batch, accumulate=candidate.train.accumulate)
            batch = task.training_rows(0, rows)
            tensors = batch.inputs, batch.targets
            found = alone.submit(
                _plan, candidate, layers, tensors, ranks, device.type, _name(device)
            ).result()
            if isinstance(found, str):
                raise TrainError(f"--plan: {found}")
            if budget is None or found.fits(budget):
                return Planned(config=candidate, plan=found)
            least = found if least is None or found.peak < least.peak else least
    assert least is not None, "the config itself is a candidate"
    raise TrainError(
        f"--budget: the least that this model needs on {least.name} rank(s) is"
        f" {least.peak / 2**20:.1f} MiB; take more ranks, a smaller train.batch or model.* settings"
    )


@dataclass(frozen=True)
class _Layers:
    """The layers of a model by their names, since a task with its data does not travel."""

    names: tuple[str, ...]

    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The modules of these names."""
        return [model.get_submodule(name) for name in self.names]


def _layers_of(task: Task) -> _Layers:
    with torch.device("meta"):
        model = task.build_model()
    names = {id(module): name for name, module in model.named_modules()}
    return _Layers(tuple(names[id(layer)] for layer in task.layers(model)))


def _candidates(config: Config, ranks: int) -> Iterator[Config]:
    """The config, then those that need less memory, from the one with least to do."""
    rows = config.train.batch // ranks
    cuts = [n for n in range(config.train.accumulate, rows + 1) if rows % n == 0]
    asked = config.parallel
    stages = [(asked.zero, asked.reshard_after_forward), (3, asked.reshard_after_forward)]
    for cut, (zero, reshard) in itertools.product(cuts, dict.fromkeys((*stages, (3, True)))):
        yield replace(
            config,
            train=replace(config.train, accumulate=cut),
            parallel=replace(asked, zero=zero, reshard_after_forward=reshard),
        )


def _name(device: torch.device) -> str | None:
    """The description that a device's name points to; None if it is an accelerator without one."""
    if device.type == "cpu":
        return "cpu"
    found = described(device)
    return None if found is None else found.name


def _mesh(config: Config, ranks: int) -> int | tuple[int, int]:
    replicas, shards = config.parallel.sizes(ranks)
    return ranks if replicas == 1 else (replicas, shards)


def _plan(
    config: Config, layers: _Layers, rows: Rows, ranks: int, kind: str, name: str | None
) -> Plan | str:
    """The plan, or why there is none; in a process of its own."""
    micro_batches, device, calls = config.train.accumulate, torch.device(kind), itertools.count(1)

    def build() -> nn.Module:
        with torch.device("meta"):
            return build_model(config)

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        shard_model(model, layers, config, mesh, device)

    def loss(model: nn.Module, given: Rows) -> torch.Tensor:
        assert isinstance(model, FSDPModule)
        announce(model, config, last=next(calls) % micro_batches == 0)
        return cross_entropy(model(given[0]), given[1], reduction="mean") / micro_batches

    try:
        return plan(
            build,
            rows,
            loss,
            mesh=_mesh(config, ranks),
            shard=shard,
            optimizer=lambda params: build_optimizer(params, config.optim),
            micro_batches=micro_batches,
            device=name,
        )
    except PlanError as error:
        return str(error)


class Watched:
    """Measures the planned values: the peak of a run's second step, and its fastest step.

    On the CPU it looks after each operation, which makes the first two steps slower.

    Args:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ledger = Ledger(Places())
        self._steps = 0
        self.peak: int | None = None
        self.step_time = math.inf

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside the ``with`` block is one step."""
        self._steps += 1
        if self._steps > 2:
            yield from self._timed()
        elif self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self._ledger.restart()
            with self._ledger:
                yield
            self.peak = self._ledger.peak.nbytes

    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.step_time = min(self.step_time, time.perf_counter() - began)

    def beside(self, plan: Plan) -> str:
        """Return the difference from the planned values, or "" before the second step."""
        if self._steps < 2 or self.peak is None:
            return ""
        words = [_beside("peak", self.peak / 2**20, plan.tensors / 2**20, "MiB")]
        if plan.step_time is not None and math.isfinite(self.step_time):
            words.append(_beside("step", 1e3 * self.step_time, 1e3 * plan.step_time, "ms"))
        return ", ".join(words)


def _beside(name: str, measured: float, planned: float, unit: str) -> str:
    off = 100 * (measured / planned - 1)
    return f"{name} {measured:.2f} {unit} measured, {planned:.2f} {unit} planned ({off:+.1f} %)"
