"""The contents of the pages about plans, verdicts and races."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fullshard.preflight.pages.page import Bar, Figure, Table, Text, timeline_figure
from fullshard.preflight.planning.memory.ledger import Category
from fullshard.preflight.planning.report import Plan
from fullshard.preflight.planning.timeline import Timeline
from fullshard.preflight.races.report import RaceReport
from fullshard.preflight.verification.verdict import Verdict

__all__ = ["plan_parts", "races_parts", "verdict_parts"]

_MIB = 2**20
_GREY = "#888"  # on white as on black
_COLOURS = dict(
    zip(
        Category,
        ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f",
         "#bcbd22", "#17becf"),
        strict=True,
    )
)  # fmt: skip
_MOST_MODULES = 120  # bars of more are a surface
_MOST_SPANS = 20_000  # a figure with more is slow


def plan_parts(plans: Sequence[Plan], budget: int | None) -> Iterator[Text | Table | Figure]:
    """Yield the table of all meshes, then the memory and the time of each plan."""
    rows = [
        (
            plan.name,
            plan.device,
            round(plan.peak / _MIB, 2),
            round(plan.held / _MIB, 2),
            "-" if budget is None else "yes" if plan.fits(budget) else "no",
            "-" if plan.step_time is None else round(1000 * plan.step_time, 2),
            "-" if plan.exposed is None else round(1000 * plan.exposed, 2),
        )
        for plan in plans
    ]
    heads = ("mesh", "device", "peak MiB", "MiB between steps", "fits", "ms a step", "ms exposed")
    yield Table(title="Choices", heads=heads, rows=rows)
    for plan in plans:
        yield _memory(plan, budget)
        yield _parts_of(plan)
        if plan.modules:
            yield Table(
                title=f"{plan.name} ranks: activations at the peak by module",
                heads=("module", "MiB"),
                rows=[(name or "(root)", round(n / _MIB, 3)) for name, n in plan.modules.items()],
            )
        if plan.time is not None:
            yield _streams(plan.name, plan.time)
        yield Text(title=f"{plan.name} ranks: report", text=str(plan))


def _memory(plan: Plan, budget: int | None) -> Figure:
    """Return the most memory at each place of a step, in layers of what it consists of."""
    places = [each for each in plan.course if each.phase != "between steps"]
    # A place is a position on the axis: two may have the same text.
    positions = list(range(len(places) + 1))
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "none",
            "stackgroup": "memory",
            "fillcolor": _COLOURS[each],
            "line": {"shape": "hv"},
            "name": each.title,
            "x": positions,
            "y": _steps(plan.course_parts[place].get(each, 0) for place in places),
            "hovertemplate": "%{y:.2f} MiB",
        }
        for each in Category
        if any(plan.course_parts[place].get(each) for place in places)
    ]
    total = {
        "type": "scatter",
        "mode": "lines",
        "line": {"shape": "hv", "width": 1, "color": _GREY},
        "name": "together",
        "x": positions,
        "y": _steps(plan.course[place] for place in places),
        "text": [str(each) for each in (*places, *places[-1:])],
        "hovertemplate": "%{y:.2f} MiB in %{text}",
    }
    phases = [each.phase for each in places]
    firsts = {phase: phases.index(phase) for phase in phases}
    line = {"yref": "paper", "y0": 0, "y1": 1, "line": {"color": _GREY, "width": 1}}
    shapes = [{"type": "line", "x0": x, "x1": x, **line} for x in firsts.values()]
    if budget is not None:
        y = budget / _MIB
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y,
                       "line": {"dash": "dash", "color": "#d9534f"}})  # fmt: skip
    layout = {
        "xaxis": {
            "title": {"text": "places of a step, in order"},
            "tickvals": [x + phases.count(phase) / 2 for phase, x in firsts.items()],
            "ticktext": list(firsts),
            "showgrid": False,
        },
        "yaxis": {"title": {"text": "MiB at most"}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "shapes": shapes,
    }
    return Figure(
        title=f"{plan.name} ranks: memory over a step", data=[*data, total], layout=layout
    )


def _steps(sizes: Iterable[int]) -> list[float]:
    """Return MiB at the left edge of each place, and at the right edge of the last one."""
    found = [size / _MIB for size in sizes]
    return [*found, *found[-1:]]


def _parts_of(plan: Plan) -> Figure:
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": each.title,
            "marker": {"color": _COLOURS[each]},
            "x": [size / _MIB],
            "y": ["peak"],
        }
        for each, size in plan.categories.items()
        if size
    ]
    layout = {"barmode": "stack", "height": 220, "xaxis": {"title": {"text": "MiB"}}}
    return Figure(title=f"{plan.name} ranks: parts of the peak", data=data, layout=layout)


def _streams(name: str, time: Timeline) -> Figure:
    """Return the streams in time: a row for each, a bar for each kernel or collective."""
    bars = [
        Bar(
            row=time.streams.get(span.launch.stream, str(span.launch.stream)),
            text=f"{span.launch.work.name}, {span.launch.place}",
            begin=1000 * span.start,
            end=1000 * span.end,
        )
        for span in sorted(time.spans[:_MOST_SPANS], key=lambda span: span.launch.stream)
    ]
    return timeline_figure(f"{name} ranks: streams and collectives", bars)


def verdict_parts(verdict: Verdict) -> Iterator[Text | Table | Figure]:
    """Yield the verdict, its differences by module, and its causes."""
    yield Text(title="Verdict", text=str(verdict))
    first = verdict.first
    if first is not None:
        names = [first.name, *verdict.others]
        modules = _by_module(names)
        yield Figure(
            title=f"Differences by module: {first.phase} of step {first.step}",
            data=[{"type": "bar", "x": list(modules), "y": list(modules.values())}],
            layout={"yaxis": {"title": {"text": "tensors that differ"}}},
        )
        yield Table(
            title="Tensors that differ",
            heads=("name", "module"),
            rows=[(name, name.rpartition(".")[0] or "(root)") for name in names],
        )
        yield Table(
            title="Causes",
            heads=("cause", "", "evidence"),
            rows=[
                (each.name, "shown" if each.tested else "fits", each.evidence)
                for each in verdict.causes
            ],
        )


def _by_module(names: Sequence[str]) -> Counter[str]:
    """Return how many tensors each module has; of many modules, those that contain them."""
    paths = [name.split(".")[:-1] for name in names]
    for depth in range(max(map(len, paths)), -1, -1):
        found = Counter(".".join(path[:depth]) or "(root)" for path in paths)
        if len(found) <= _MOST_MODULES:
            break
    return found


def races_parts(report: RaceReport) -> Iterator[Text | Table | Figure]:
    """Yield the report, the races, and the operations of each stream."""
    yield Text(title="Report", text=str(report))
    rows = [
        (race.memory, race.kind.value, str(race.first), str(race.second), count)
        for race, count in report.races.items()
    ]
    heads = ("memory", "conflict", "first", "second", "seen")
    yield Table(title=f"Races: {len(rows)}", heads=heads, rows=rows)
    names, counts = list(report.operations), list(report.operations.values())
    yield Figure(
        title="Operations by stream",
        data=[{"type": "bar", "x": names, "y": counts}],
        layout={"yaxis": {"title": {"text": "operations"}, "type": "log"}},
    )
