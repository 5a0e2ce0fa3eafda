"""The plans as a picture: memory of all choices, and both curves of scaling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # after the choice of a backend

from fullshard_bench.planning.rows import Planned
from fullshard_bench.planning.scaling import Scaled
from fullshard_bench.reporting.plots import colour_of

__all__ = ["draw_table"]

_GIB = 2**30
_IDEAL: dict[str, Any] = {"color": "#7d8491", "linestyle": ":"}


def draw_table(
    rows: Sequence[Planned], curve: Sequence[Scaled], budget: int | None, item: str, path: Path
) -> None:
    """Write the picture: memory by ranks, and the curves, if there are any."""
    panels = 3 if curve else 1
    figure, axes = plt.subplots(
        1, panels, figsize=(4.8 * panels, 4.6), squeeze=False, layout="constrained"
    )
    _draw_memory(axes[0][0], rows, budget)
    if curve:
        ranks = [each.row.job.mesh.ranks for each in curve]
        _draw_weak(axes[0][1], curve, ranks, item)
        _draw_strong(axes[0][2], curve, ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_memory(axes: Any, rows: Sequence[Planned], budget: int | None) -> None:
    colours = plt.get_cmap("tab10")
    for place, name in enumerate(dict.fromkeys(str(row.job.choice) for row in rows)):
        chosen = sorted(
            (row for row in rows if str(row.job.choice) == name),
            key=lambda row: row.job.mesh.ranks,
        )
        ranks = [row.job.mesh.ranks for row in chosen]
        sizes = [row.peak / _GIB for row in chosen]
        axes.plot(ranks, sizes, marker="o", color=colours(place % 10), label=name)
    if budget is not None:
        axes.axhline(budget / _GIB, color="#a44a3f", linestyle="--", label="budget")
    axes.set_ylim(bottom=0)
    _decorate(axes, "peak memory of a rank (GiB)", _labels(rows))


def _draw_weak(axes: Any, curve: Sequence[Scaled], ranks: Sequence[int], item: str) -> None:
    first = curve[0].weak / ranks[0]
    axes.plot(
        ranks, [first * each for each in ranks], color="#7d8491", linestyle=":", label="ideal"
    )
    speeds = [each.weak for each in curve]
    axes.plot(ranks, speeds, marker="o", color=colour_of("fullshard"), label="planned")
    axes.set_yscale("log")
    _decorate(axes, f"weak scaling: {item}/s", _labels([each.row for each in curve]))


def _draw_strong(axes: Any, curve: Sequence[Scaled], ranks: Sequence[int]) -> None:
    whole = curve[0].strong * ranks[0]
    axes.plot(
        ranks, [whole / each for each in ranks], color="#7d8491", linestyle=":", label="ideal"
    )
    steps = [each.strong for each in curve]
    axes.plot(ranks, steps, marker="o", color=colour_of("fullshard"), label="planned")
    axes.set_yscale("log")
    _decorate(axes, "strong scaling: step (s)", _labels([each.row for each in curve]))


def _labels(rows: Sequence[Planned]) -> dict[int, str]:
    """For a number of ranks the mesh, if the mesh has more axes."""
    shown: dict[int, str] = {}
    for row in rows:
        ranks, name = row.job.mesh.ranks, str(row.job.mesh)
        shown[ranks] = name if name == str(ranks) else f"{ranks}\n({name})"
    return shown


def _decorate(axes: Any, title: str, labels: dict[int, str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(labels), list(labels.values()), fontsize=7)
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)
