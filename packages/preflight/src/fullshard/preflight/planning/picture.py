"""A plan as a picture: memory over the step, what the peak is made of, and what each stream does.

Owns the drawing, for which matplotlib has to be installed; no other module needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.preflight.costs.collectives import Collective
from fullshard.preflight.costs.kernels import Kernel
from fullshard.preflight.planning.memory.ledger import Category
from fullshard.preflight.planning.memory.places import Place
from fullshard.preflight.planning.recorder import Launch
from fullshard.preflight.planning.timeline import Timeline

__all__ = ["Picture"]

_UNITS = {"GiB": 2**30, "MiB": 2**20}
_COLOURS = {
    "forward": "#0b6e4f",
    "backward": "#30638e",
    "computed again": "#8d5a97",
    "optimizer": "#7d8491",
    "collectives": "#d1495b",
    "copies to and from the host": "#edae49",
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What is drawn.

    Attributes:
        where: the ranks, and what they compute on.
        course: the most bytes at each place of a step.
        place: that of the peak.
        categories: what the peak is made of.
        time: the step in time, if that is known.
        budget: bytes, for a line; None for none.
    """

    where: str
    course: Mapping[Place, int]
    place: Place
    categories: Mapping[Category, int]
    time: Timeline | None
    budget: int | None

    @property
    def unit(self) -> tuple[str, int]:
        """The unit of memory: a name, and how many bytes."""
        name = "GiB" if sum(self.categories.values()) >= 2**30 else "MiB"
        return name, _UNITS[name]

    def save(self, path: str | Path) -> None:
        """Write the picture in the format of the suffix of ``path``.

        Raises:
            RuntimeError: if matplotlib is not installed.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise RuntimeError("a picture needs matplotlib; pip install matplotlib") from error
        heights = [3.0, 1.2] + ([2.2] if self.time else [])
        figure = Figure(figsize=(10, sum(heights) + 0.6), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights})
        _draw_course(panels[0], self)
        _draw_peak(panels[1], self)
        if self.time is not None:
            _draw_streams(panels[2], self.time)
        figure.savefig(path)


def _draw_course(axes: Any, picture: Picture) -> None:
    places = [each for each in picture.course if each.phase != "between steps"]
    unit, nbytes = picture.unit
    sizes = [picture.course[each] / nbytes for each in places]
    axes.fill_between(range(len(sizes)), sizes, step="post", alpha=0.5, color=_COLOURS["forward"])
    phases = [each.phase for each in places]
    firsts = {phase: phases.index(phase) for phase in phases}
    axes.set_xticks(list(firsts.values()), list(firsts), ha="left")
    if picture.budget is not None:
        axes.axhline(picture.budget / nbytes, color="#a44a3f", label="budget")
        axes.legend(loc="upper right", frameon=False)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    _title(axes, f"most memory at each place of a step: {picture.where}")


def _draw_peak(axes: Any, picture: Picture) -> None:
    left, peak = 0.0, sum(picture.categories.values())
    unit, whole = picture.unit
    for category, nbytes in picture.categories.items():
        if nbytes > peak // 200:
            axes.barh(0, nbytes / whole, left=left, height=0.6, label=category.title)
            left += nbytes / whole
    axes.set_yticks([])
    axes.set_xlabel(unit)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=7)
    axes.set_title(f"the peak, in {picture.place}", fontsize=9, loc="right")


def _draw_streams(axes: Any, time: Timeline) -> None:
    shown: dict[str, None] = {}
    for row, stream in enumerate(time.streams):
        bars: dict[str, list[tuple[float, float]]] = {}
        for each in time.spans:
            if each.launch.stream == stream:
                span = 1e3 * each.start, 1e3 * (each.end - each.start)
                bars.setdefault(_kind(each.launch), []).append(span)
        for kind, spans in bars.items():
            label = "" if kind in shown else kind
            shown[kind] = None
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=_COLOURS[kind], label=label)
    axes.set_yticks(range(len(time.streams)), list(time.streams.values()))
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * time.step_time)
    axes.set_xlabel("milliseconds")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=7)


def _kind(launch: Launch) -> str:
    if isinstance(launch.work, Collective):
        return "collectives"
    if not isinstance(launch.work, Kernel):
        return "copies to and from the host"
    if launch.again:
        return "computed again"
    phase = launch.place.phase
    return phase if phase in _COLOURS else "optimizer"


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
