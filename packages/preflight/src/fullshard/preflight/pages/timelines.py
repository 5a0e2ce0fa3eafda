"""A figure of what ran when: a row for each stream, a bar for each kernel or collective."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fullshard.preflight.pages.page import Figure

__all__ = ["Bar", "timeline_figure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """An interval in a row.

    Attributes:
        row: the name of the row.
        text: what ran.
        begin: milliseconds.
        end: milliseconds.
    """

    row: str
    text: str
    begin: float
    end: float


def timeline_figure(title: str, bars: Iterable[Bar]) -> Figure:
    """Return a figure with a row for each name, in the order of the first bars from below."""
    rows: dict[str, list[Bar]] = {}
    for bar in bars:
        rows.setdefault(bar.row, []).append(bar)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": row,
            "y": [row] * len(ran),
            "base": [bar.begin for bar in ran],
            "x": [bar.end - bar.begin for bar in ran],
            "text": [bar.text for bar in ran],
            "textposition": "none",
            "hovertemplate": "%{text}<br>%{base:.3f} ms, %{x:.3f} ms long<extra></extra>",
        }
        for row, ran in rows.items()
    ]
    layout = {"barmode": "overlay", "showlegend": False, "xaxis": {"title": {"text": "ms"}}}
    return Figure(title=title, data=data, layout=layout)
