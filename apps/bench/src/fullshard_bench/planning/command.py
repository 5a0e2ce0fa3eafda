"""The command `plan`: a table over meshes and choices, curves of scaling, and the best that fits.

Owns the order of actions, and the text around the tables.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from fullshard.preflight import DEVICES, Category, Choice, Here, parse_bytes
from fullshard_bench.errors import BenchError
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape
from fullshard_bench.planning.files import Files
from fullshard_bench.planning.pictures import draw_table
from fullshard_bench.planning.rows import Job, Planned, planners
from fullshard_bench.planning.scaling import Scaled, best_of, scaled
from fullshard_bench.planning.tables import rows_table, scaling_tables, size

__all__ = ["Planning", "show_plans"]


@dataclass(frozen=True, kw_only=True)
class Planning:
    """Request of the command: a model on each of the meshes, with each of the choices.

    Attributes:
        model: as `make_workload` reads it.
        shape: one rank's batch in a step, all micro-batches together.
        meshes: as `parse_mesh` reads them.
        choices: from the most preferred to the least preferred.
        jobs: how many processes plan at once.
        device: what they compute on, for the time of a step; "here" for this machine, "" for any
            accelerator.
        costs: a file that keeps what was measured of this machine; None for none.
        budget: how much memory a device has, such as `80GiB`; "" for what is described.
        files: which files are written.
    """

    model: str
    shape: Shape
    meshes: Sequence[str]
    choices: Sequence[Choice]
    jobs: int = 1
    device: str = ""
    costs: Path | None = None
    budget: str = ""
    files: Files = field(default_factory=Files)

    @property
    def is_here(self) -> bool:
        """Whether this machine is measured, with one plan after another."""
        return self.device == "here"


@dataclass(frozen=True, kw_only=True)
class _Found:
    """The output of the command."""

    item: str
    budget: int | None
    rows: Sequence[Planned]
    curve: Sequence[Scaled]
    best: Planned | None

    @property
    def verdict(self) -> str:
        """The best that fits, or by how much nothing does."""
        told = "" if self.budget is None else f" that fits {size(self.budget)}"
        if self.best is None:
            assert self.budget is not None, "without one anything fits"
            least = min(self.rows, key=lambda row: row.peak)
            kept = [Category.SHARDS, Category.OPTIMIZER_STATE]
            alone = min(sum(map(row.categories.__getitem__, kept)) for row in self.rows)
            more = f"; shards and optimizer state alone are {size(alone)}"
            return (
                f"None fits {size(self.budget)}; the least is {size(least.peak)}, on"
                f" {least.job.mesh} ranks, {least.job.choice}{more if alone > self.budget else ''}."
                " Take more ranks that shard, --checkpointing yes, --offload yes, more"
                " --micro-batches or fewer --rows."
            )
        where = f"{self.best.job.mesh} ranks, {self.best.job.choice}"
        if not self.best.speed:
            return f"The first{told}: {where}."
        return f"The quickest{told}: {where}, {self.best.speed:.0f} {self.item}/s/device."


def show_plans(planning: Planning, console: Console) -> None:
    """Print a table with a row for each mesh and choice, curves, and the best that fits.

    Raises:
        BenchError: a mesh, a model or a budget is none, or a model cannot be planned; or, after
            all is printed and written, nothing fits.
    """
    jobs = _jobs(planning)
    budget = _budget(planning)
    item = make_workload(planning.model, planning.shape).item  # raises before a process starts
    planning.files.check(timed=planning.device not in ("", "cpu"))
    processes = 1 if planning.is_here else min(planning.jobs, len(jobs))
    with planners(processes) as plan_rows:
        rows = []
        for found in plan_rows(jobs):
            rows.append(found)
            console.print(f"{len(rows)} of {len(jobs)}: {found.job}", highlight=False)
        curve = scaled(rows, budget, plan_rows)
    said = _Found(item=item, budget=budget, rows=rows, curve=curve, best=best_of(rows, budget))
    grids = [rows_table(f"{planning.model}: one rank", rows, budget, item)]
    grids += scaling_tables(curve, item) if curve else []
    for grid in grids:
        console.print(grid.to_terminal())
    for line in _notes(said):
        console.print(line, highlight=False)
    if said.best is not None and (budget is not None or rows[0].time is not None):
        console.print(said.verdict, highlight=False)
    written = planning.files.write(
        said.best,
        budget,
        [*(grid.to_markdown() for grid in grids), *_notes(said), said.verdict],
        lambda path: draw_table(rows, curve, budget, item, path),
    )
    if written:
        console.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    if said.best is None:
        raise BenchError(said.verdict)


def _jobs(planning: Planning) -> list[Job]:
    if planning.device not in ("", "cpu", "here", *DEVICES):
        raise BenchError(
            f"--device {planning.device!r}: must be here, cpu or one of"
            f" {', '.join(sorted(DEVICES))}"
        )
    if planning.costs is not None and not planning.is_here:
        raise BenchError("--costs keeps what was measured of this machine: give --device here, too")
    for choice in planning.choices:
        if planning.shape.rows % choice.micro_batches:
            raise BenchError(
                f"--micro-batches {choice.micro_batches}: does not divide the batch's"
                f" {planning.shape.rows} rows; change --rows"
            )
    return [
        Job(
            model=planning.model,
            shape=planning.shape,
            device=planning.device,
            mesh=parse_mesh(text),
            choice=choice,
            here=Here(cache=planning.costs) if planning.is_here else None,
        )
        for text, choice in itertools.product(planning.meshes, planning.choices)
    ]


def _budget(planning: Planning) -> int | None:
    if planning.budget:
        try:
            return parse_bytes(planning.budget)
        except ValueError as error:
            raise BenchError(f"--budget {error}") from None
    described = DEVICES.get(planning.device)
    return None if described is None else int(described.memory)


def _notes(said: _Found) -> list[str]:
    """Remarks about the figures."""
    lines = [
        "Peak of tensors alive in a step, of the rank with the largest shards. An allocator keeps"
        " more; attention is a fused kernel, whose memory does not grow with tokens squared."
    ]
    times = [row.time for row in said.rows if row.time is not None]
    if times:
        lines += [f"Times {basis}." for basis in dict.fromkeys(each.basis for each in times)]
        unknown = sorted({name for each in times for name in each.by_bytes_alone})
        lines += [f"Timed by their bytes alone: {', '.join(unknown)}."] if unknown else []
    elif said.rows[0].job.device == "cpu":
        lines.append("Ranks on CPUs, which keep buffers of collectives from step to step.")
    else:
        lines.append("Ranks on accelerators; --device names one, for the time of a step.")
    if said.curve:
        lines.append(
            "Strong scaling: a rank's micro-batches come one after another, each taking as much"
            " longer as the second does."
        )
    return lines
