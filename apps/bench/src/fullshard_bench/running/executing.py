"""The execution of runs: each measurement in turn, then the files.

Owns the loop over measurements, here or in the ranks of torchrun, and the paths of the files.
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

from fullshard_bench.errors import BenchError
from fullshard_bench.launching.job import Job, JobResult
from fullshard_bench.launching.launch import run_jobs
from fullshard_bench.launching.machine import describe_machine, describe_versions
from fullshard_bench.launching.world import inside_torchrun, torchrun_world
from fullshard_bench.measuring import checking, counting, kernels, memory, verifying
from fullshard_bench.measuring.measurement import measure
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.records.conversion import to_table
from fullshard_bench.records.deriving import DEFINITIONS
from fullshard_bench.records.result import (
    FORMAT,
    Point,
    Result,
    RunResult,
    read_result,
    write_result,
)
from fullshard_bench.reporting.bars import judge, judge_measured, verdict_lines, verdict_rows
from fullshard_bench.reporting.page import write_result_page
from fullshard_bench.reporting.plots import draw_all
from fullshard_bench.reporting.report import write_report
from fullshard_bench.reporting.terminal import (
    ProgressBar,
    print_count,
    print_point,
    print_table,
    print_verdicts,
)
from fullshard_bench.reporting.timeline import draw_timeline
from fullshard_bench.reporting.trace import Events, write_trace
from fullshard_bench.running.run import Run, check_run

__all__ = ["Outputs", "execute"]

Measure = Callable[[Sequence[Job], ProgressBar], Sequence[JobResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The files that a command writes.

    Attributes:
        stem: path of the JSON file and the report, without their endings.
        trace: path of a Chrome trace of a step; None for none.
        timeline: path of a picture of a step; None for none.
        html: path of a page of the result; None for none.
        pictures: whether to draw the result, with links from the report.
    """

    stem: Path
    trace: Path | None
    timeline: Path | None
    html: Path | None
    pictures: bool


def execute(
    runs: Sequence[Run], outputs: Outputs, words: Sequence[str], console: Console
) -> Result:
    """Measure all runs, print tables during the run, and write the files.

    Raises:
        BenchError: a run asks for what cannot be, or a rank failed.
    """
    start = time.perf_counter()
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
        _write(result, outputs, events, console, brief)
    return result


def _measure_all(
    runs: Sequence[Run], console: Console, measure_some: Measure
) -> tuple[list[RunResult], Events]:
    events: Events = ()
    results: list[RunResult] = []
    told: set[str] = set()
    with ProgressBar(sum(len(run.jobs()) for run in runs), console) as watch:
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


def _here(jobs: Sequence[Job], watch: ProgressBar, device: torch.device) -> list[JobResult]:
    """Measure in this process, one of torchrun's ranks; those beyond the mesh wait."""
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
        pictures = draw_all(result, stem) if outputs.pictures else []
        verdicts = judge(result)
        extra = verdict_lines(verdicts)
        write_report(result, stem.with_name(f"{stem.name}.md"), pictures, extra)
        if outputs.trace is not None:
            write_trace(events, outputs.trace)
        if outputs.timeline is not None:
            draw_timeline(events, outputs.timeline)
        if outputs.html is not None:
            write_result_page(result, outputs.html, events)
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
    others = (outputs.trace, outputs.timeline, outputs.html)
    written += [str(path) for path in others if path is not None]
    console.print("written: " + ", ".join(written), highlight=False, markup=False, soft_wrap=True)


def draw_record(record: Path, stem: Path | None, console: Console) -> None:
    """Draw the pictures of a kept result.

    Args:
        record: a JSON file that `execute` wrote.
        stem: path of the pictures without their endings; None for the path of the record.
        console: prints the paths of the pictures.

    Raises:
        BenchError: the file cannot be read or is no result, or a picture cannot be written.
    """
    try:
        pictures = draw_all(read_result(record), record.with_suffix("") if stem is None else stem)
    except OSError as error:
        raise BenchError(f"{error.filename}: {error.strerror or error}") from error
    written = ", ".join(map(str, pictures))
    console.print(f"written: {written}", highlight=False, markup=False, soft_wrap=True)


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
