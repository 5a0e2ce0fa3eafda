"""The command `plan`: a model on meshes that are not there, a row for each mesh and choice.

Owns the product of choices, who plans which, and the table. `fullshard.preflight.plan` plans each.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fullshard.preflight import (
    DEVICES,
    Category,
    Choice,
    Device,
    Plan,
    PlanError,
    plan,
    split_batch,
)
from fullshard_bench.errors import BenchError
from fullshard_bench.meshes import MeshShape, parse_mesh
from fullshard_bench.models import make_workload
from fullshard_bench.training import make_optimizer
from fullshard_bench.workload import Shape, Workload

__all__ = ["Planned", "Planning", "parse_bytes", "plan_one", "show_plans"]

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What is planned: a model on each of the meshes, with each of the choices.

    Attributes:
        model: as `make_workload` reads it.
        shape: one rank's batch in a step, all micro-batches together.
        meshes: as `parse_mesh` reads them.
        choices: from the first that is preferred to the last.
        jobs: how many processes plan at once.
        device: what they compute on, for the time of a step; "" for none.
    """

    model: str
    shape: Shape
    meshes: Sequence[str]
    choices: Sequence[Choice]
    jobs: int = 1
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One row: a mesh, a choice and its plan, in which a rank computes so many items."""

    mesh: MeshShape
    choice: Choice
    plan: Plan
    items: int

    @property
    def speed(self) -> float:
        """Items per second and device; 0 without a device."""
        return self.items / self.plan.step_time if self.plan.step_time else 0.0


def parse_bytes(text: str) -> int:
    """The bytes that `80GiB`, `512MiB` or a number mean.

    Raises:
        BenchError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|B|)", text)
    if match is None:
        raise BenchError(f"--budget {text!r}: write a size such as 80GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def show_plans(planning: Planning, budget: int | None, console: Console) -> None:
    """Prints a table with a row for each mesh and choice, then the best that fits.

    Raises:
        BenchError: a mesh or a model is none, or cannot be planned.
    """
    rows = [
        (parse_mesh(text), choice)
        for text, choice in itertools.product(planning.meshes, planning.choices)
    ]
    for _, choice in rows:
        if planning.shape.rows % choice.micro_batches:
            raise BenchError(
                f"--micro-batches {choice.micro_batches}: does not divide the batch's"
                f" {planning.shape.rows} rows; change --rows"
            )
    item = make_workload(planning.model, planning.shape).item  # raises before a process starts
    if planning.device:
        budget = budget or int(_device(planning.device).memory)
    planned = []
    for found in _plan_all(planning, rows):
        planned.append(found)
        console.print(
            f"{len(planned)} of {len(rows)}: {found.mesh}, {found.choice}", highlight=False
        )
    console.print(_table(planning, planned, budget, item))
    console.print(
        "Peak of tensors alive in a step, of the rank with the largest shards. An allocator keeps"
        " more; attention is a fused kernel, whose memory does not grow with tokens squared."
    )
    for line in _footer(planned):
        console.print(line, highlight=False)
    if budget is not None:
        console.print(_best(planned, budget, item))


def _device(name: str) -> Device:
    if name not in DEVICES:
        raise BenchError(f"--device {name!r}: must be one of {', '.join(sorted(DEVICES))}")
    return DEVICES[name]


def _plan_all(planning: Planning, rows: Sequence[tuple[MeshShape, Choice]]) -> Iterator[Planned]:
    """The rows planned, in order, as they are ready."""
    one = partial(plan_one, planning.model, planning.shape, planning.device)
    jobs = min(planning.jobs, len(rows))
    if jobs == 1:
        yield from itertools.starmap(one, rows)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(one, *zip(*rows, strict=True))


def plan_one(model: str, shape: Shape, device: str, mesh: MeshShape, choice: Choice) -> Planned:
    """One row of the table.

    Raises:
        BenchError: the model cannot be planned.
    """
    workload = make_workload(model, shape)
    try:
        found = plan(
            partial(_build, workload),
            lambda: split_batch(list(workload.batch(torch.Generator())), choice.micro_batches),
            workload.loss,
            mesh=mesh.sizes if len(mesh.sizes) == 2 else mesh.sizes[0],
            shard=partial(choice.shard, workload.units),
            optimizer=lambda params: make_optimizer(list(params)),
            micro_batches=choice.micro_batches,
            device=device or None,
        )
    except PlanError as error:
        raise BenchError(f"model {model!r}: {error}") from None
    return Planned(mesh=mesh, choice=choice, plan=found, items=workload.items)


def _build(workload: Workload) -> nn.Module:
    with torch.device("meta" if workload.on_meta else "cpu"):
        return workload.build()


def _table(planning: Planning, planned: Sequence[Planned], budget: int | None, item: str) -> Table:
    table = Table(title=f"{planning.model}: one rank", title_justify="left")
    for name in ("mesh", "choices"):
        table.add_column(name, overflow="fold")
    named = ["parameters", "gradients", "optimizer", "activations", "other"]
    timed = ["step", "exposed", "MFU", f"{item}/s/device"]
    for name in ("peak", *(timed if planning.device else named)):
        table.add_column(name, justify="right")
    table.add_column("" if budget is None else "fits")
    for row in planned:
        fits = "" if budget is None else "yes" if row.plan.fits(budget) else "no"
        cells = _times(row) or list(map(_size, _parts(row.plan)))
        table.add_row(str(row.mesh), str(row.choice), _size(row.plan.peak), *cells, fits)
    return table


def _footer(planned: Sequence[Planned]) -> list[str]:
    """What is to be said of the times; without a device, of the memory."""
    timed = [row.plan.time for row in planned if row.plan.time is not None]
    if not timed:
        return [
            "Buffers of collectives are kept from step to step, as on a CPU; not with --device."
        ]
    efficiency = str(timed[0].device.efficiency)
    lines = [f"Times from a description of {timed[0].device.name}; {efficiency}."]
    unknown = sorted({name for each in timed for name in each.by_bytes_alone})
    if unknown:
        lines.append(f"Timed by their bytes alone: {', '.join(unknown)}.")
    return lines


def _times(row: Planned) -> list[str]:
    time = row.plan.time
    if time is None:
        return []
    return [
        f"{1e3 * time.step_time:.1f} ms",
        f"{1e3 * time.exposed:.1f} ms",
        f"{100 * time.utilisation:.1f} %",
        f"{row.speed:.0f}",
    ]


def _parts(found: Plan) -> tuple[int, ...]:
    """What the peak is made of in the table's columns, and what is left."""
    parts = found.categories
    named = (
        parts[Category.SHARDS] + parts[Category.GATHERED],
        parts[Category.GRADIENTS] + parts[Category.UNREDUCED],
        parts[Category.OPTIMIZER_STATE],
        parts[Category.ACTIVATIONS],
    )
    return (*named, found.peak - sum(named))


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _best(planned: Sequence[Planned], budget: int, item: str) -> str:
    """The quickest row that fits; without time the first, since they come preferred first."""
    fitting = [row for row in planned if row.plan.fits(budget)]
    if not fitting:
        least = min(row.plan.peak for row in planned)
        return f"None fits {_size(budget)}; the least is {_size(least)}."
    best = max(fitting, key=lambda row: row.speed)
    where = f"{best.mesh} ranks, {best.choice}"
    if not best.speed:
        return f"The first that fits {_size(budget)}: {where}."
    return f"The quickest that fits {_size(budget)}: {where}, {best.speed:.0f} {item}/s/device."
