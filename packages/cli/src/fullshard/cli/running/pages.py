"""The page about runs: loss curves, steps of each rank, memory and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fullshard.cli.running.runs import Run
from fullshard.insight import SlowRanksReport
from fullshard.preflight.spi import Figure, Table

__all__ = ["run_parts"]

_MIB = 2**20
_COLUMNS = 200  # of a heat map; more steps are averaged


def run_parts(runs: Sequence[Run]) -> Iterator[Table | Figure]:
    """Yield the table of runs, loss curves of all runs, and the ranks of each run."""
    values = [run.value() for run in runs]
    heads = ("ranks", "steps", "step_seconds", "slowest_rank", "first_loss", "last_loss")
    rows = [(value["name"], *(_text(value[head]) for head in heads)) for value in values]
    yield Table(title="Runs", heads=("run", *(each.replace("_", " ") for each in heads)), rows=rows)
    curves = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": list(losses),
            "y": [*losses.values()],
        }
        for run in runs
        for name, losses in ((run.name, run.losses), (f"{run.name}, held out", run.held_out))
        if losses
    ]
    if curves:
        layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": "loss"}}}
        yield Figure(title="Loss", data=curves, layout=layout)
    for run in runs:
        if run.ranks:
            yield _heat(run)
            if run.slow_ranks is not None:
                yield from _own_times(run, run.slow_ranks)
            yield _memory(run)
            yield _bytes(run)


def _text(value: object) -> object:
    return "-" if value is None else round(value, 6) if isinstance(value, float) else value


def _heat(run: Run) -> Figure:
    """Return a map of milliseconds: a row for each rank, a column for some steps."""
    longest = max(len(each.step_seconds) for each in run.ranks)
    width = max(1, -(-longest // _COLUMNS))
    data = {
        "type": "heatmap",
        "x": [1 + width * column for column in range(-(-longest // width))],
        "y": [f"rank {each.rank}" for each in run.ranks],
        "z": [_averages(each.step_seconds, width) for each in run.ranks],
        "colorbar": {"title": {"text": "ms"}},
    }
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"autorange": "reversed"}}
    return Figure(title=f"{run.name}: time of steps by rank", data=[data], layout=layout)


def _own_times(run: Run, report: SlowRanksReport) -> Iterator[Table | Figure]:
    """Yield the slow ranks, and two maps: own time by rank and phase, and by rank and step."""
    heads = ("rank", "phase", "module", "ms more than others", "part of a step")
    found = [
        (each.rank, each.phase, each.module, f"{1000 * each.seconds:.1f}", f"{each.share:.0%}")
        for each in report.slow
    ]
    none = [("-", "no rank is slow", "-", "-", "-")]
    yield Table(title=f"{run.name}: slow ranks", heads=heads, rows=found or none)
    ranks = [f"rank {rank}" for rank in report.ranks]
    phases = [str(phase) for phase in report.own]
    own = [[1000 * of[place] for of in report.own.values()] for place in range(len(ranks))]
    steps = [[1000 * step[place] for step in report.by_step] for place in range(len(ranks))]
    for title, x, z in (("phase", phases, own), ("step", list(report.steps), steps)):
        data: dict[str, Any] = {"type": "heatmap", "x": x, "y": ranks, "z": z}
        data["colorbar"] = {"title": {"text": "ms"}}
        layout = {"xaxis": {"title": {"text": title}}, "yaxis": {"autorange": "reversed"}}
        name = f"{run.name}: own time by rank and {title}, waits for other ranks not counted"
        yield Figure(title=name, data=[data], layout=layout)


def _averages(seconds: Sequence[float], width: int) -> list[float]:
    parts = (seconds[at : at + width] for at in range(0, len(seconds), width))
    return [1000 * sum(part) / len(part) for part in parts]


def _memory(run: Run) -> Figure:
    names = [f"rank {each.rank}" for each in run.ranks]
    data = {"type": "bar", "x": names, "y": [each.peak_memory / _MIB for each in run.ranks]}
    layout = {"yaxis": {"title": {"text": "MiB"}, "rangemode": "tozero"}}
    return Figure(title=f"{run.name}: peak memory by rank", data=[data], layout=layout)


def _bytes(run: Run) -> Figure:
    kinds = dict.fromkeys(kind for each in run.ranks for kind in each.events)
    data = [
        {
            "type": "bar",
            "name": kind,
            "x": [f"rank {each.rank}" for each in run.ranks],
            "y": [each.bytes_of(kind) / _MIB / max(each.steps, 1) for each in run.ranks],
        }
        for kind in kinds
        if any(each.bytes_of(kind) for each in run.ranks)
    ]
    layout = {"barmode": "group", "yaxis": {"title": {"text": "MiB of one step"}}}
    return Figure(title=f"{run.name}: bytes of collectives and copies", data=data, layout=layout)
