"""The parts of a command: runs, and the measurements that each of them is.

Owns the checks that come before any rank starts, so that a mistake costs no time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fullshard_bench.contestants.registry import check_contestants
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.job import Job
from fullshard_bench.launching.machine import memory_bytes
from fullshard_bench.launching.network import check_network
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape
from fullshard_bench.settings import Settings

__all__ = ["Run", "check_run"]

_RANKS_PER_CORE = 16
_STATES = 16  # bytes for each parameter: itself, its gradient and two of AdamW's, in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model over several meshes and wide worlds.

    Attributes:
        name: how results call it.
        settings: model, contestants and how they train.
        meshes: meshes of ranks that are there.
        wide: sizes of worlds of which one rank is.
        trace: whether the last mesh also records a step of fullshard's events.
        brief: whether each bar is printed in one line after its measurement, instead of tables.
    """

    name: str
    settings: Settings
    meshes: tuple[str, ...] = ()
    wide: tuple[int, ...] = ()
    trace: bool = False
    brief: bool = False

    def jobs(self) -> list[list[Job]]:
        """The measurements, in order; those in one list take turns, step by step.

        Wide worlds do, on the CPU: they measure the growth of host time. A device's memory
        may not hold the models of several.
        """
        settings, last = self.settings, len(self.meshes) - 1
        jobs = [
            [Job(settings=settings, kind="mesh", mesh=mesh, trace=self.trace and place == last)]
            for place, mesh in enumerate(self.meshes)
        ]
        wide = [
            Job(settings=settings, kind="wide", mesh=str(ranks), trace=False) for ranks in self.wide
        ]
        if self.takes_turns:
            return [*jobs, wide]
        return [*jobs, *([job] for job in wide)]

    @property
    def takes_turns(self) -> bool:
        """Whether its wide worlds take turns."""
        return len(self.wide) > 1 and self.settings.device == "cpu"


def check_run(run: Run, *, world: int | None) -> None:
    """Raise what can be known before ranks start.

    Args:
        run: what is asked for.
        world: ranks that torchrun made; None if the benchmark starts its own.

    Raises:
        BenchError: a mesh is larger than the machine allows, a model or contestant is not there.
    """
    settings = run.settings
    if not (run.meshes or run.wide):
        raise BenchError("nothing to measure: give --mesh or --wide")
    _check_wide(run, world)
    check_contestants(settings)
    if settings.network:
        if world is not None:
            raise BenchError("--network makes its own hosts; start without torchrun")
        if settings.device != "cpu":
            raise BenchError("--network is for ranks on the CPU; use --device cpu")
        check_network(settings.network)
        _check_hosts(run)
    if run.trace and "fullshard" not in settings.impl:
        raise BenchError("--trace and --timeline show fullshard's events: add it to --impl")
    if run.trace and not run.meshes:
        raise BenchError("--trace and --timeline show real ranks: give --mesh")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device cuda: this torch sees no GPU; use --device cpu")
    for mesh in run.meshes:
        _check_size(mesh, settings, world)
    _check_memory(run)


def _check_hosts(run: Run) -> None:
    per_host = run.settings.ranks_per_host
    for mesh in run.meshes:
        ranks = parse_mesh(mesh).ranks
        if ranks % per_host:
            raise BenchError(
                f"--ranks-per-host {per_host}: the {ranks} ranks of --mesh {mesh} are no multiple"
                " of it; hosts have as many each"
            )


def _check_wide(run: Run, world: int | None) -> None:
    settings = run.settings
    if any(ranks < 1 for ranks in run.wide):
        raise BenchError(f"--wide {min(run.wide)}: must be at least 1")
    if run.wide and world is not None:
        raise BenchError("--wide needs no ranks: start without torchrun")
    if settings.wide_group == "fake":
        _check_fake(run)


def _check_fake(run: Run) -> None:
    settings = run.settings
    if not run.wide:
        raise BenchError("--wide-group fake: is of worlds that are not there; give --wide too")
    if settings.device != "cpu":
        raise BenchError(
            f"--wide-group fake: on {settings.device} the group's own copies would count among the"
            " contestants' copy kernels; use --device cpu or --wide-group silent"
        )
    if "ddp" in settings.impl:
        raise BenchError(
            "--wide-group fake: DDP takes its gradients from what a collective's future holds, and"
            " that group's hold none; leave ddp out of --impl or use --wide-group silent"
        )


def _check_size(mesh: str, settings: Settings, world: int | None) -> None:
    ranks = parse_mesh(mesh).ranks
    if world is not None:
        if ranks > world:
            raise BenchError(
                f"--mesh {mesh}: needs {ranks} ranks, and torchrun started {world}; start more"
            )
    elif settings.device == "cuda":
        if ranks > torch.cuda.device_count():
            raise BenchError(
                f"--mesh {mesh}: needs {ranks} GPUs, one for each rank, and there are"
                f" {torch.cuda.device_count()}; use a smaller mesh or --device cpu"
            )
    elif ranks > _RANKS_PER_CORE * (os.cpu_count() or 1):
        raise BenchError(
            f"--mesh {mesh}: {ranks} ranks on {os.cpu_count()} core(s) would measure nothing; at"
            f" most {_RANKS_PER_CORE} for each core, or --wide {ranks}"
        )


def _check_memory(run: Run) -> None:
    """Parameters, gradients and optimizer state of all contestants must fit into main memory."""
    settings = run.settings
    shape = Shape(rows=settings.rows, tokens=settings.tokens)
    workload = make_workload(settings.model, shape)
    if not workload.on_meta or settings.device != "cpu":
        return
    with torch.device("meta"):
        size = sum(each.numel() for each in workload.build().parameters()) * _STATES
    copies = 0
    for mesh in run.meshes:
        ranks = parse_mesh(mesh).ranks
        replicas = parse_mesh(mesh).replicate
        each = [ranks if name in ("ddp", "none") else replicas for name in settings.impl]
        copies = max(copies, sum(each) * (2 if settings.exposed else 1))
    if run.wide:
        copies = max(copies, sum(name in ("ddp", "none") for name in settings.impl))
    there = memory_bytes()
    if there and copies * size > there:
        raise BenchError(
            f"--model {settings.model}: needs about {copies * size / 2**30:.0f} GiB, and this"
            f" machine has {there / 2**30:.0f}; use a smaller model or mesh, fewer contestants"
            " (ddp and none hold the whole model on each rank), or --no-exposed"
        )
