"""A plan carried out: every measurement in turn, then the files.

Owns the loop over measurements, here or in the ranks of torchrun, and what is written where.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from fullshard_bench import checking, counting, kernels, memory, verifying
from fullshard_bench.bars import judge, judge_measured, verdict_lines, verdict_rows
from fullshard_bench.deriving import DEFINITIONS
from fullshard_bench.errors import BenchError
from fullshard_bench.job import Job, JobResult
from fullshard_bench.launch import run_jobs
from fullshard_bench.machine import describe_machine, describe_versions
from fullshard_bench.measuring import measure
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.plan import Run, check_run
from fullshard_bench.plots import draw_all
from fullshard_bench.records import to_table
from fullshard_bench.report import write_report
from fullshard_bench.result import FORMAT, Point, Result, RunResult, write_result
from fullshard_bench.terminal import (
    Watch,
    print_count,
    print_point,
    print_table,
    print_verdicts,
)
from fullshard_bench.timeline import draw_timeline
from fullshard_bench.trace import Events, write_trace
from fullshard_bench.world import inside_torchrun, torchrun_world

__all__ = ["Outputs", "execute"]

Measure = Callable[[Sequence[Job], Watch], Sequence[JobResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where results go: `stem` with endings; a trace and a timeline if asked for."""

    stem: Path
    trace: Path | None
    timeline: Path | None


def execute(
    runs: Sequence[Run], outputs: Outputs, words: Sequence[str], console: Console
) -> Result:
    """Measures all runs, prints tables during the run, and writes the files.

    Raises:
        BenchError: a run asks for what cannot be, or a rank failed.
    """
    start = time.perf_counter()
    traced = bool(outputs.trace or outputs.timeline)
    command = shlex.join(["python", "-m", "fullshard_bench", *words])
    if inside_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        for run in runs:
            check_run(run, world=world)
        with torchrun_world(runs[0].settings.device) as device:
            done = _measure_all(runs, console, lambda jobs, watch: _here(jobs, watch, device))
    else:
        for run in runs:
            check_run(run, world=None)
        done = _measure_all(runs, console, lambda jobs, watch: run_jobs(jobs, watch.tell))
    results, events = done
    result = Result(
        format=FORMAT,
        created=datetime.now(UTC).isoformat(" ", "minutes").removesuffix("+00:00"),
        seconds=round(time.perf_counter() - start, 1),
        command=command,
        machine=describe_machine(),
        versions=describe_versions(),
        definitions=(
            *DEFINITIONS, counting.DEFINITION, memory.DEFINITION, kernels.DEFINITION,
            checking.DEFINITION,
            *([verifying.DEFINITION] if any(run.settings.verify for run in runs) else []),
        ),
        runs=tuple(results),
    )  # fmt: skip
    if os.environ.get("RANK", "0") == "0":
        brief = all(run.brief for run in runs)
        _write(result, outputs, events if traced else (), console, brief)
    return result


def _measure_all(
    runs: Sequence[Run], console: Console, measure_some: Measure
) -> tuple[list[RunResult], Events]:
    events: Events = ()
    results: list[RunResult] = []
    told: set[str] = set()
    with Watch(sum(len(run.jobs()) for run in runs), console) as watch:
        for run in runs:
            found: list[JobResult] = []
            for jobs in run.jobs():
                meshes = ", ".join(job.mesh for job in jobs)
                watch.begin(f"{run.name}, {jobs[0].kind} {meshes}")
                some = measure_some(jobs, watch)
                watch.end()
                found += some
                so_far = _result_of(run, found)
                for each in some:
                    events = each.events or events
                    if not run.brief:
                        print_point(console, so_far, each.point)
                if run.brief:
                    print_verdicts(console, judge_measured([*results, so_far]), told)
            results.append(_result_of(run, found))
    return results, events


def _here(jobs: Sequence[Job], watch: Watch, device: torch.device) -> list[JobResult]:
    """Measures in this process, one of torchrun's ranks; those beyond the mesh wait."""
    return [measure(job, device, watch.tell) or _idle(job) for job in jobs]


def _result_of(run: Run, found: Sequence[JobResult]) -> RunResult:
    return RunResult(
        name=run.name,
        settings={**to_table(run.settings), "in_turns": run.takes_turns},
        parameters=max(each.parameters for each in found),
        parameter_bytes=max(each.parameter_bytes for each in found),
        item=found[0].item,
        items_per_rank=found[0].items_per_rank,
        points=tuple(each.point for each in found),
    )


def _write(result: Result, outputs: Outputs, events: Events, console: Console, brief: bool) -> None:
    stem = outputs.stem
    try:
        write_result(result, stem.with_name(f"{stem.name}.json"))
        pictures = draw_all(result, stem)
        verdicts = judge(result)
        extra = verdict_lines(verdicts)
        write_report(result, stem.with_name(f"{stem.name}.md"), pictures, extra)
        if outputs.trace is not None:
            write_trace(events, outputs.trace)
        if outputs.timeline is not None:
            draw_timeline(events, outputs.timeline)
    except OSError as error:
        raise BenchError(f"{error.filename}: {error.strerror or error}") from error
    if brief:
        print_count(console, judge_measured(result.runs), result.seconds)
    elif verdicts:
        heads, rows = verdict_rows(verdicts)
        print_table(console, "Bars", heads, rows)
    for definition in () if brief else result.definitions:
        console.print(f"- {definition}", style="dim", highlight=False, markup=False)
    written = [f"{stem}.json", f"{stem}.md", *map(str, pictures)]
    written += [str(path) for path in (outputs.trace, outputs.timeline) if path is not None]
    console.print("written: " + ", ".join(written), highlight=False, markup=False, soft_wrap=True)


def _idle(job: Job) -> JobResult:
    """The result of a rank for a mesh without this rank."""
    ranks = parse_mesh(job.mesh).ranks
    point = Point(
        kind=job.kind,
        mesh=job.mesh,
        ranks=ranks,
        entries=(),
        reference_losses=(),
        reference_norms=(),
    )
    return JobResult(
        point=point, parameters=0, parameter_bytes=0, item="", items_per_rank=0, events=()
    )
