"""Rows of the table: a mesh, a choice and its figures, each planned in a process of its own.

Owns who plans which. `fullshard.preflight.plan` plans each; a row keeps the figures, not the trace.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from fullshard.preflight import Category, Choice, Here, Plan, PlanError, plan, split_batch
from fullshard_bench.contestants.training import make_optimizer
from fullshard_bench.errors import BenchError, told_of
from fullshard_bench.meshes import MeshShape
from fullshard_bench.models.registry import MODELS, make_workload
from fullshard_bench.models.workload import Shape, Workload

__all__ = ["Job", "Planned", "Planner", "StepTime", "plan_whole", "planners"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The subject of one row.

    Attributes:
        model: as `make_workload` reads it.
        shape: one rank's batch in a step, all micro-batches together.
        device: as `fullshard.preflight.plan` takes it; "" for any accelerator, without time.
        here: how this machine is measured, where the device is "here".
        mesh: the ranks.
        choice: how it is sharded and trained.
    """

    model: str
    shape: Shape
    device: str
    mesh: MeshShape
    choice: Choice
    here: Here | None = None

    def __str__(self) -> str:
        """Return the name that progress shows."""
        return f"{self.mesh}, {self.choice}"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step, on a device that is described, or on this machine.

    Attributes:
        seconds: of the whole step.
        exposed: in which collectives are waited for.
        host_bound: in which the host is behind.
        utilisation: MFU, a part of 1.
        basis: where it is from, in words.
        by_bytes_alone: operators of unknown work.
    """

    seconds: float
    exposed: float
    host_bound: float
    utilisation: float
    basis: str
    by_bytes_alone: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A row: what a job needs, and how long a step takes.

    Attributes:
        job: what was planned.
        peak: bytes of a rank's device.
        host: bytes of a rank on the host of an accelerator.
        categories: what the peak is made of.
        items: that a rank computes in a step.
        time: None without a described device.
    """

    job: Job
    peak: int
    host: int
    categories: Mapping[Category, int]
    items: int
    time: StepTime | None

    @property
    def speed(self) -> float:
        """Items per second and device; 0 without time."""
        return self.items / self.time.seconds if self.time else 0.0


def plan_whole(job: Job) -> Plan:
    """The plan of a job.

    Raises:
        BenchError: it cannot be planned.
    """
    workload, choice, mesh = make_workload(job.model, job.shape), job.choice, job.mesh
    try:
        return plan(
            partial(_build, workload),
            lambda: split_batch(list(workload.batch(torch.Generator())), choice.micro_batches),
            workload.loss,
            mesh=mesh.sizes if len(mesh.sizes) == 2 else mesh.sizes[0],
            shard=partial(choice.shard, workload.units),
            optimizer=lambda params: make_optimizer(list(params)),
            micro_batches=choice.micro_batches,
            device=job.here or job.device or None,
        )
    except (PlanError, ValueError) as error:
        raise BenchError(f"model {job.model!r} on {job}: {error}") from None
    except Exception as error:
        if job.model.partition(":")[0] in MODELS:
            raise  # a bug of ours
        raise BenchError(f"model {job.model!r} on {job}: {told_of(error)}") from error


def _build(workload: Workload) -> nn.Module:
    with torch.device("meta" if workload.on_meta else "cpu"):
        return workload.build()


def _row(job: Job) -> Planned:
    found = plan_whole(job)
    timed, time = found.time, None
    if timed is not None:
        time = StepTime(
            seconds=timed.step_time,
            exposed=timed.exposed,
            host_bound=timed.host_bound,
            utilisation=timed.utilisation,
            basis=timed.device.measured
            or f"from a description of {timed.device.name}; {timed.device.efficiency}",
            by_bytes_alone=timed.by_bytes_alone,
        )
    return Planned(
        job=job,
        peak=found.peak,
        host=found.host,
        categories=found.categories,
        items=make_workload(job.model, job.shape).items,
        time=time,
    )


Planner = Callable[[Sequence[Job]], Iterator[Planned]]


@contextmanager
def planners(jobs: int) -> Iterator[Planner]:
    """Plan rows in several processes, and yield them in order."""
    if jobs == 1:
        yield partial(map, _row)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield partial(pool.map, _row)
