"""A step as a picture: compute, gather and reduce lanes of the first rank, coloured by group."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # after the choice of a backend
from matplotlib.patches import Rectangle

from fullshard_bench.errors import BenchError
from fullshard_bench.reporting.trace import Events, Span, spans_of

__all__ = ["draw_timeline"]

_LANES = (("compute", "forward"), ("compute", "backward"), ("gather", ""), ("reduce", ""))
_TITLES = ("forward", "backward", "gather", "reduce")


def draw_timeline(events: Events, path: Path) -> None:
    """Write the picture of rank 0's step.

    Raises:
        BenchError: there are no events.
    """
    if not events or not events[0]:
        raise BenchError("--timeline: fullshard reported no events; did it fail?")
    spans = spans_of(events[0])
    groups = list(dict.fromkeys(span.group for span in spans))
    colours = plt.get_cmap("tab20")
    figure, axes = plt.subplots(figsize=(12, 4.2), layout="constrained")
    whole = max(span.end_us for span in spans) / 1e3
    for row, (lane, what) in enumerate(_LANES):
        chosen = [s for s in spans if s.lane == lane and what in ("", s.what)]
        for span, level, levels in _stacked(chosen):
            height = 0.8 / levels
            begin, width = span.begin_us / 1e3, (span.end_us - span.begin_us) / 1e3
            bottom = -row - 0.4 + level * height
            colour = colours(groups.index(span.group) % 20)
            axes.broken_barh(
                [(begin, width)], (bottom, height), facecolors=[colour], edgecolor="white",
                linewidth=0.4,
            )  # fmt: skip
            if width > whole * 0.03 and height > 0.1:
                axes.text(
                    begin + width / 2, bottom + height / 2, span.group, ha="center", va="center",
                    fontsize=6, clip_on=True,
                )  # fmt: skip
    axes.set_yticks([-row for row in range(len(_LANES))], _TITLES)
    axes.set_xlabel("host time since the step began (ms)")
    axes.set_title(
        f"one step of fullshard on rank 0 of {len(events)}: a gather lasts until its parameters are"
        " usable, a reduction until its gradients are",
        fontsize=9,
        loc="left",
    )
    axes.set_xlim(0, whole)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    handles = [
        Rectangle((0, 0), 1, 1, color=colours(index % 20), label=name)
        for index, name in enumerate(groups)
    ]
    columns = 1 + len(groups) // 20
    axes.legend(
        handles=handles, fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5),
        ncols=columns,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _stacked(spans: list[Span]) -> list[tuple[Span, int, int]]:
    """Return each span, its level among overlapping spans, and the number of levels."""
    ends: list[float] = []
    placed: list[tuple[Span, int]] = []
    for span in spans:
        level = next((i for i, end in enumerate(ends) if end <= span.begin_us), len(ends))
        if level == len(ends):
            ends.append(0.0)
        ends[level] = span.end_us
        placed.append((span, level))
    return [(span, level, max(1, len(ends))) for span, level in placed]
