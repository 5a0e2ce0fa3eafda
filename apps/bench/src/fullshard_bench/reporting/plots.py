"""A result as pictures: step time and memory by mesh, where the time goes, and wide worlds.

Owns one colour for each contestant, the same in every picture, and units on every axis. A
contestant whose losses are wrong has no bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # after the choice of a backend
from matplotlib.patches import Rectangle

from fullshard_bench.records.result import Entry, Point, Result, RunResult

__all__ = ["colour_of", "draw_all"]

_COLOURS = {"fullshard": "#0b6e4f", "torch": "#d1495b", "ddp": "#edae49", "none": "#7d8491"}
_OTHERS = ("#30638e", "#8d5a97", "#00798c", "#a44a3f")
_LABELS = {
    "fullshard": "fullshard",
    "torch": "torch fully_shard",
    "ddp": "DDP",
    "none": "unsharded",
}
_MIB = 2**20


def colour_of(name: str, others: Sequence[str] = ()) -> str:
    """The colour of a contestant; of a user's own, by its place among `others`."""
    if name in _COLOURS:
        return _COLOURS[name]
    place = list(others).index(name) if name in others else 0
    return _OTHERS[place % len(_OTHERS)]


def draw_all(result: Result, stem: Path) -> list[Path]:
    """Write the pictures that the result has figures for, as `stem` and what they show."""
    meshes = [(run, points) for run in result.runs if (points := _of_kind(run, "mesh"))]
    wides = [(run, points) for run in result.runs if (points := _of_kind(run, "wide"))]
    paths = []
    if meshes:
        paths.append(_draw(stem, "time", meshes, _draw_time))
        paths.append(_draw(stem, "memory", meshes, _draw_memory))
        paths.append(_draw(stem, "breakdown", meshes, _draw_breakdown))
    if wides:
        paths.append(_draw(stem, "wide", wides, _draw_wide, panels=3))
    return paths


def _of_kind(run: RunResult, kind: str) -> list[Point]:
    return [point for point in run.points if point.kind == kind]


def _draw(
    stem: Path,
    what: str,
    runs: list[tuple[RunResult, list[Point]]],
    draw: Callable[[Any, RunResult, list[Point]], None],
    panels: int = 1,
) -> Path:
    """Draw a row of panels for each run, in one picture."""
    figure, rows = plt.subplots(
        len(runs),
        panels,
        figsize=(9 if panels == 1 else 4.6 * panels, 3.4 * len(runs) + 0.3),
        squeeze=False,
        layout="constrained",
    )
    for row, (run, points) in zip(rows, runs, strict=True):
        draw(row if panels > 1 else row[0], run, points)
    path = stem.with_name(f"{stem.name}_{what}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _names(points: Sequence[Point]) -> list[str]:
    """The contestants that have figures somewhere, in the order in which they were named."""
    names: dict[str, None] = {}
    for point in points:
        names |= {entry.name: None for entry in point.entries if entry.is_ranked}
    return list(names)


def _grouped_bars(
    axes: Any,
    points: Sequence[Point],
    value: Callable[[Entry], float],
    interval: Callable[[Entry], tuple[float, float]] | None = None,
) -> None:
    """For each mesh, a bar for each contestant, with its value above."""
    names = _names(points)
    width = _width(names)
    for index, name in enumerate(names):
        places, heights, errors = [], [], []
        for number, point in enumerate(points):
            entry = point.entry(name)
            if entry is None or not entry.is_ranked:
                continue
            places.append(number + (index - (len(names) - 1) / 2) * width)
            heights.append(value(entry))
            errors.append((0.0, 0.0) if interval is None else interval(entry))
        bars = axes.bar(
            places,
            heights,
            width * 0.92,
            color=colour_of(name, names),
            label=_LABELS.get(name, name),
            yerr=None if interval is None else list(zip(*errors, strict=True)),
            capsize=2,
            error_kw={"elinewidth": 0.8},
        )
        axes.bar_label(bars, fmt=_short, fontsize=7, padding=2)
    axes.set_xticks(range(len(points)), [_mesh_label(point) for point in points])
    axes.set_xlim(-0.6, len(points) - 0.4)
    axes.margins(y=0.15)
    _decorate(axes)


def _error_bar(axes: Any, place: float, value: float, reach: tuple[float, float]) -> None:
    """The 90 % interval at the top of what was drawn there: so far below and above it."""
    below, above = reach
    style = {"ecolor": "black", "elinewidth": 0.8, "capsize": 2}
    axes.errorbar(place, value, [[below], [above]], fmt="none", **style)


def _short(value: float) -> str:
    """Three digits, or all of a larger number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _width(names: Sequence[str]) -> float:
    """Return the width of a bar, where neighbouring meshes are 1 apart."""
    return min(0.2, 0.8 / max(1, len(names)))


def _mesh_label(point: Point) -> str:
    return f"{point.mesh}\n({point.ranks} rank{'s' if point.ranks > 1 else ''})"


def _decorate(axes: Any, handles: list[Any] | None = None) -> None:
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if handles is None:
        handles, _ = axes.get_legend_handles_labels()
    # Above the panel, under its title: no bar can hide it.
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.1,
        fontsize=8,
        frameon=False,
        ncols=8,
    )


def _draw_time(axes: Any, run: RunResult, points: list[Point]) -> None:
    def interval(entry: Entry) -> tuple[float, float]:
        assert entry.derived is not None
        step = entry.derived.step_ms
        return step.value - step.low, step.high - step.value

    def step_ms(entry: Entry) -> float:
        assert entry.derived is not None
        return entry.derived.step_ms.value

    _grouped_bars(axes, points, step_ms, interval)
    axes.set_title(f"{run.name}: time of a step, lower is better", fontsize=10, loc="left", pad=20)
    axes.set_ylabel("step, median (ms)")
    axes.set_xlabel("mesh: shards, or replicas x shards")


def _draw_memory(axes: Any, run: RunResult, points: list[Point]) -> None:
    def peak(entry: Entry) -> float:
        assert entry.figures is not None
        return entry.figures.memory["peak"] / _MIB

    _grouped_bars(axes, points, peak)
    axes.set_title(
        f"{run.name}: peak memory of a rank, lower is better", fontsize=10, loc="left", pad=20
    )
    axes.set_ylabel("peak memory (MiB)")
    axes.set_xlabel("mesh: shards, or replicas x shards")


def _draw_breakdown(axes: Any, run: RunResult, points: list[Point]) -> None:
    """Stacked: the unsharded step, what host and copies add to it, and exposed communication."""
    names = [name for name in _names(points) if name != "none"]
    width = _width(names)
    for index, name in enumerate(names):
        for number, point in enumerate(points):
            entry, plain = point.entry(name), point.entry("none")
            if entry is None or entry.derived is None or not entry.is_ranked:
                continue
            if plain is None or plain.derived is None or entry.derived.exposed_ms is None:
                continue
            place = number + (index - (len(names) - 1) / 2) * width
            exposed = max(0.0, entry.derived.exposed_ms.value)
            compute = min(plain.derived.step_ms.value, entry.derived.step_ms.value - exposed)
            rest = max(0.0, entry.derived.step_ms.value - exposed - compute)
            colour, bottom = colour_of(name, names), 0.0
            for height, hatch, alpha in (
                (compute, "", 1),
                (rest, "...", 0.65),
                (exposed, "//", 0.4),
            ):
                axes.bar(
                    place, height, width * 0.92, bottom=bottom, color=colour, alpha=alpha,
                    hatch=hatch, edgecolor="white", linewidth=0.5,
                )  # fmt: skip
                bottom += height
            step = entry.derived.step_ms
            _error_bar(axes, place, bottom, (step.value - step.low, step.high - step.value))
            axes.text(place, step.high, _short(bottom), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(points)), [_mesh_label(point) for point in points])
    axes.set_xlabel("mesh: shards, or replicas x shards")
    parts = [("unsharded step", "", 1), ("host and copies", "...", 0.65)]
    parts.append(("exposed communication", "//", 0.4))
    handles = [
        Rectangle((0, 0), 1, 1, label=_LABELS.get(name, name), fc=colour_of(name, names))
        for name in names
    ]
    handles += [
        Rectangle((0, 0), 1, 1, label=label, hatch=hatch, alpha=alpha, fc="#555555", ec="white")
        for label, hatch, alpha in parts
    ]
    axes.set_title(f"{run.name}: where the time of a step goes", fontsize=10, loc="left", pad=20)
    axes.set_ylabel("step, median (ms)")
    axes.set_xlim(-0.6, len(points) - 0.4)
    axes.margins(y=0.15)
    _decorate(axes, handles)


def _draw_wide(panels: Any, run: RunResult, points: list[Point]) -> None:
    """Against the size of a world that is not there: host time, construction, memory."""
    shown: list[tuple[str, str, Callable[[Entry], float | None]]] = [
        ("host time of a step\nover the unsharded step", "ms", _host_over),
        ("construction", "ms", _construction),
        ("peak memory of a rank", "MiB", _peak),
    ]
    names = [name for name in _names(points) if name != "none"]
    there = "torch's fake group" if run.wide_group == "fake" else "nothing is moved"
    for axes, (title, unit, value) in zip(panels, shown, strict=True):
        for name in names:
            pairs = [
                (point.ranks, found)
                for point in points
                if (entry := point.entry(name)) is not None
                and entry.is_ranked
                and (found := value(entry)) is not None
            ]
            axes.plot(
                [ranks for ranks, _ in pairs],
                [found for _, found in pairs],
                marker="o",
                color=colour_of(name, names),
                label=_LABELS.get(name, name),
            )
            for ranks, found, reach in _reaches(points, name) if value is _host_over else ():
                _error_bar(axes, ranks, found, reach)
        axes.set_xscale("log", base=2)
        if value is _construction:
            axes.set_yscale("log")  # a factor of hundreds
        axes.set_xticks([point.ranks for point in points], [str(p.ranks) for p in points])
        axes.minorticks_off()
        axes.margins(y=0.12)
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{title} ({unit})", fontsize=9)
        axes.set_xlabel(f"ranks (one is there; {there})", fontsize=9)
        _decorate(axes)
        axes.get_legend().set_visible(axes is panels[0])
    panels[0].set_title(f"{run.name}: wide worlds", fontsize=10, loc="left", pad=20)


def _host_over(entry: Entry) -> float | None:
    over = entry.derived.host_over_ms if entry.derived else None
    return None if over is None else over.value


def _reaches(
    points: Sequence[Point], name: str
) -> Iterator[tuple[int, float, tuple[float, float]]]:
    """Yield of each world: ranks, host time over the unsharded step, reach of its interval."""
    for point in points:
        entry = point.entry(name)
        over = entry.derived.host_over_ms if entry is not None and entry.derived else None
        if over is not None:
            yield point.ranks, over.value, (over.value - over.low, over.high - over.value)


def _construction(entry: Entry) -> float | None:
    return entry.figures.construction_ms if entry.figures else None


def _peak(entry: Entry) -> float | None:
    return entry.figures.memory["peak"] / _MIB if entry.figures else None
