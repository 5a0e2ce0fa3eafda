"""A result as an HTML page: step time with intervals by mesh, memory, and the report's text.

Owns the contents; `fullshard.preflight.spi` writes the file, which needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fullshard.preflight.spi import Figure, PageError, Table, write_page
from fullshard_bench.errors import BenchError
from fullshard_bench.records.result import Result, RunResult

__all__ = ["write_result_page"]


def write_result_page(result: Result, path: Path) -> None:
    """Write the page.

    Raises:
        BenchError: plotly is missing, or the file cannot be written.
    """
    try:
        write_page(path, f"Benchmark of {result.created}", _parts(result))
    except PageError as error:
        raise BenchError(str(error)) from error


def _parts(result: Result) -> Iterator[Table | Figure]:
    for run in result.runs:
        yield Table(
            title=f"{run.name}: contestants",
            heads=("mesh", "contestant", "status", "ms a step", "low", "high", "of torch's"),
            rows=list(_rows(run)),
        )
        yield _figure(run)


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


def _figure(run: RunResult) -> Figure:
    """Return bars of the median step with its 90 % interval; a wrong contestant has none."""
    names = dict.fromkeys(entry.name for point in run.points for entry in point.entries)
    data = []
    for name in names:
        found = [
            (f"{point.kind} {point.mesh}", entry.derived.step_ms)
            for point in run.points
            if (entry := point.entry(name)) and entry.is_ranked and entry.derived is not None
        ]
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": [mesh for mesh, _ in found],
                "y": [step.value for _, step in found],
                "error_y": {
                    "type": "data",
                    "symmetric": False,
                    "array": [step.high - step.value for _, step in found],
                    "arrayminus": [step.value - step.low for _, step in found],
                },
            }
        )
    layout = {"barmode": "group", "yaxis": {"title": {"text": "ms a step"}, "rangemode": "tozero"}}
    return Figure(title=f"{run.name}: step, median and 90 % interval", data=data, layout=layout)
