"""A result as an HTML page: step time with intervals and memory by mesh, and a step in time.

Owns the contents; `fullshard.preflight.spi` writes the file, which needs no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from fullshard.preflight.spi import (
    Bar,
    Figure,
    PageError,
    Table,
    require_page,
    timeline_figure,
    write_page,
)
from fullshard_bench.errors import BenchError
from fullshard_bench.records.result import Entry, Result, RunResult
from fullshard_bench.reporting.trace import Events, spans_of

__all__ = ["check_page", "write_result_page"]

_MIB = 2**20


def check_page(path: Path) -> None:
    """Check, before a measurement, that a page can be written.

    Raises:
        BenchError: plotly is missing, or there is no folder for the file.
    """
    try:
        require_page(path)
    except PageError as error:
        raise BenchError(str(error)) from error


def write_result_page(result: Result, path: Path, events: Events = ()) -> None:
    """Write the page; a record has no events of a step, and its page no timeline.

    Raises:
        BenchError: plotly is missing, or the file cannot be written.
    """
    try:
        write_page(path, f"Benchmark of {result.created}", _parts(result, events))
    except PageError as error:
        raise BenchError(str(error)) from error


def _parts(result: Result, events: Events) -> Iterator[Table | Figure]:
    for run in result.runs:
        yield Table(
            title=f"{run.name}: contestants",
            heads=("mesh", "contestant", "status", "ms a step", "low", "high", "of torch's"),
            rows=list(_rows(run)),
        )
        yield _step(run)
        yield _memory(run)
    if events:
        title = f"One step of fullshard on rank 0 of {len(events)}, by the clock of its host"
        yield timeline_figure(title, _bars(events))


def _rows(run: RunResult) -> Iterator[tuple[object, ...]]:
    for point in run.points:
        for entry in point.entries:
            derived = entry.derived if entry.is_ranked else None
            if derived is None:
                yield (point.mesh, entry.name, f"{entry.status} {entry.reason}".strip(), *"----")
                continue
            step, ratio = derived.step_ms, derived.over_torch
            times = (round(each, 3) for each in (step.value, step.low, step.high))
            compared = "-" if ratio is None else round(ratio.value, 3)
            yield (point.mesh, entry.name, entry.status, *times, compared)


def _ranked(run: RunResult) -> Iterator[tuple[str, list[tuple[str, Entry]]]]:
    """Yield each contestant, with the meshes on which it has a rank."""
    names = dict.fromkeys(entry.name for point in run.points for entry in point.entries)
    for name in names:
        found = [
            (f"{point.kind} {point.mesh}", entry)
            for point in run.points
            if (entry := point.entry(name)) and entry.is_ranked
        ]
        yield name, found


def _step(run: RunResult) -> Figure:
    """Return bars of the median step with its 90 % interval; a wrong contestant has none."""
    data = []
    for name, found in _ranked(run):
        steps = [entry.derived.step_ms for _, entry in found if entry.derived is not None]
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": [mesh for mesh, _ in found],
                "y": [step.value for step in steps],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [step.high - step.value for step in steps],
                    "arrayminus": [step.value - step.low for step in steps],
                },
            }
        )
    title = f"{run.name}: step, median and 90 % interval"
    return Figure(title=title, data=data, layout=_bars_of("ms a step"))


def _memory(run: RunResult) -> Figure:
    """Return bars of the peak of a step; their text has the memory between steps."""
    data = []
    for name, found in _ranked(run):
        sizes = [entry.figures.memory for _, entry in found if entry.figures is not None]
        text = [f"{each.get('held', 0) / _MIB:.1f} MiB between steps" for each in sizes]
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": [mesh for mesh, _ in found],
                "y": [each["peak"] / _MIB for each in sizes],
                "text": text,
                "textposition": "none",
                "hovertemplate": "%{y:.1f} MiB at most, %{text}",
            }
        )
    title = f"{run.name}: peak memory of a rank in a step"
    return Figure(title=title, data=data, layout=_bars_of("MiB"))


def _bars_of(unit: str) -> dict[str, object]:
    return {"barmode": "group", "yaxis": {"title": {"text": unit}, "rangemode": "tozero"}}


def _bars(events: Events) -> Iterable[Bar]:
    for row in ("reduce", "gather", "backward", "forward"):
        for span in spans_of(events[0]):
            if span.what.startswith(row):
                begin, end = span.begin_us / 1000, span.end_us / 1000
                yield Bar(row=row, text=span.group, begin=begin, end=end)
