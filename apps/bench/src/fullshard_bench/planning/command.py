"""The command `plan`: a table over meshes and choices, curves of scaling, and the best that fits.

Owns the order of things, what is said beside the tables, and the files that are written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fullshard.preflight import DEVICES, Choice, parse_bytes
from fullshard_bench.errors import BenchError
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.models import make_workload
from fullshard_bench.planning.pictures import draw_table
from fullshard_bench.planning.rows import Job, Planned, plan_whole, planners
from fullshard_bench.planning.scaling import Scaled, best_of, scaled
from fullshard_bench.planning.tables import Grid, rows_table, scaling_tables, size
from fullshard_bench.workload import Shape

__all__ = ["Planning", "show_plans"]


@dataclass(frozen=True, kw_only=True)
class Planning:
    """What is planned: a model on each of the meshes, with each of the choices.

    Attributes:
        model: as `make_workload` reads it.
        shape: one rank's batch in a step, all micro-batches together.
        meshes: as `parse_mesh` reads them.
        choices: from the first that is preferred to the last.
        jobs: how many processes plan at once.
        device: what they compute on, for the time of a step; "" for any accelerator.
        budget: how much memory a device has, such as `80GiB`; "" for what is described.
        stem: where files are written to; None for none.
    """

    model: str
    shape: Shape
    meshes: Sequence[str]
    choices: Sequence[Choice]
    jobs: int = 1
    device: str = ""
    budget: str = ""
    stem: Path | None = None


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What the command has to say."""

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
            least = min(row.peak for row in self.rows)
            return f"None fits {size(self.budget)}; the least is {size(least)}."
        where = f"{self.best.job.mesh} ranks, {self.best.job.choice}"
        if not self.best.speed:
            return f"The first{told}: {where}."
        return f"The quickest{told}: {where}, {self.best.speed:.0f} {self.item}/s/device."


def show_plans(planning: Planning, console: Console) -> None:
    """Prints a table with a row for each mesh and choice, curves, and the best that fits.

    Raises:
        BenchError: a mesh, a model or a budget is none, or a model cannot be planned.
    """
    jobs = _jobs(planning)
    budget = _budget(planning)
    item = make_workload(planning.model, planning.shape).item  # raises before a process starts
    with planners(min(planning.jobs, len(jobs))) as plan_rows:
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
    if budget is not None or rows[0].time is not None:
        console.print(said.verdict, highlight=False)
    if planning.stem is not None:
        written = _write(planning.stem, said, grids)
        console.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


def _jobs(planning: Planning) -> list[Job]:
    if planning.device not in ("", "cpu", *DEVICES):
        raise BenchError(
            f"--device {planning.device!r}: must be cpu or one of {', '.join(sorted(DEVICES))}"
        )
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
    """What is to be known of the figures."""
    lines = [
        "Peak of tensors alive in a step, of the rank with the largest shards. An allocator keeps"
        " more; attention is a fused kernel, whose memory does not grow with tokens squared."
    ]
    times = [row.time for row in said.rows if row.time is not None]
    if times:
        lines.append(f"Times from a description of {times[0].assumptions}.")
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


def _write(stem: Path, said: _Found, grids: Sequence[Grid]) -> list[Path]:
    """Tables and curves; of the best that fits a picture, and the trace of its step."""
    table, picture = stem.with_name(f"{stem.name}.md"), stem.with_name(f"{stem.name}.png")
    written = [table, picture]
    try:
        draw_table(said.rows, said.curve, said.budget, said.item, picture)
        texts = [*(grid.to_markdown() for grid in grids), *_notes(said), said.verdict]
        if said.best is not None:
            whole = plan_whole(said.best.job)
            best = stem.with_name(f"{stem.name}_best.png")
            whole.draw(best, budget=said.budget)
            written.append(best)
            texts.append(f"```text\n{whole}\n```")
            if whole.time is not None:
                trace = stem.with_name(f"{stem.name}_best.json")
                whole.time.save(trace)
                written.append(trace)
        texts += [f"![{path.stem}]({path.name})" for path in written if path.suffix == ".png"]
        table.write_text("\n\n".join(texts) + "\n")
    except OSError as error:
        raise BenchError(f"{error.filename}: {error.strerror or error}") from error
    return written
