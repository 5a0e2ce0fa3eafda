"""The contents of the pages about plans, verdicts and races."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from fullshard.preflight.pages.page import Figure, Table, Text
from fullshard.preflight.planning.report import Plan
from fullshard.preflight.planning.timeline import Timeline
from fullshard.preflight.races.report import RaceReport
from fullshard.preflight.verification.verdict import Verdict

__all__ = ["plan_parts", "races_parts", "verdict_parts"]

_MIB = 2**20
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
    places = list(map(str, plan.course))
    # a place may come twice, so the position is the axis, and the name is a label
    data = [
        {
            "type": "bar",
            "name": "memory",
            "x": list(range(len(places))),
            "y": [size / _MIB for size in plan.course.values()],
            "text": places,
            "textposition": "none",
            "hovertemplate": "%{text}<br>%{y:.2f} MiB<extra></extra>",
        }
    ]
    shapes = []
    if budget is not None:
        y = budget / _MIB
        shapes = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y,
                   "line": {"dash": "dash", "color": "#d9534f"}}]  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "places of a step, in order"}, "showticklabels": False},
        "yaxis": {"title": {"text": "MiB at most"}, "rangemode": "tozero"},
        "shapes": shapes,
    }
    return Figure(title=f"{plan.name} ranks: memory over a step", data=data, layout=layout)


def _parts_of(plan: Plan) -> Figure:
    data = [
        {"type": "bar", "orientation": "h", "name": each.title, "x": [size / _MIB], "y": ["peak"]}
        for each, size in plan.categories.items()
        if size
    ]
    layout = {"barmode": "stack", "height": 220, "xaxis": {"title": {"text": "MiB"}}}
    return Figure(title=f"{plan.name} ranks: parts of the peak", data=data, layout=layout)


def _streams(name: str, time: Timeline) -> Figure:
    """Return the streams in time: a row for each, a bar for each kernel or collective."""
    spans = sorted(time.spans[:_MOST_SPANS], key=lambda span: span.launch.stream)
    data = []
    for stream, group in groupby(spans, key=lambda span: span.launch.stream):
        ran = list(group)
        title = time.streams.get(stream, str(stream))
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": title,
                "y": [title] * len(ran),
                "base": [1000 * span.start for span in ran],
                "x": [1000 * (span.end - span.start) for span in ran],
                "text": [f"{span.launch.work.name}, {span.launch.place}" for span in ran],
                "textposition": "none",
                "hovertemplate": "%{text}<br>%{base:.3f} ms, %{x:.3f} ms long<extra></extra>",
            }
        )
    layout = {"barmode": "overlay", "xaxis": {"title": {"text": "ms"}}}
    return Figure(title=f"{name} ranks: streams and collectives", data=data, layout=layout)


def verdict_parts(verdict: Verdict) -> Iterator[Text | Table | Figure]:
    """Yield the verdict, its differences by module, and its causes."""
    yield Text(title="Verdict", text=str(verdict))
    first = verdict.first
    if first is not None:
        names = [first.name, *verdict.others]
        modules = Counter(name.rpartition(".")[0] or "(root)" for name in names)
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
