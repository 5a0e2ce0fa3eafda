"""One HTML file from tables and figures, with plotly's script inside and nothing to fetch.

Figures are plotly's JSON: ``data`` and ``layout``. Colours follow the reader's choice of light or
dark, and widths follow the window.
"""

from __future__ import annotations

import html
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "Bar",
    "Figure",
    "PageError",
    "Table",
    "Text",
    "require_folder",
    "require_page",
    "timeline_figure",
    "write_page",
]


class PageError(RuntimeError):
    """A page that cannot be written."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Paragraphs of preformatted text.

    Attributes:
        title: a heading.
        text: the lines.
    """

    title: str
    text: str

    def to_html(self, number: int) -> str:
        """Return the element."""
        return f"<h2>{html.escape(self.title)}</h2><pre>{html.escape(self.text)}</pre>"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table, which scrolls by itself if it is long or wide.

    Attributes:
        title: a heading.
        heads: names of the columns.
        rows: cells; a column with numbers is aligned to the right.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]

    def to_html(self, number: int) -> str:
        """Return the element, with a field that filters rows if there are many."""
        kinds = [
            ' class="number"'
            if any(isinstance(row[place], int | float) for row in self.rows)
            else ""
            for place in range(len(self.heads))
        ]
        heads = _cells("th", self.heads, kinds)
        rows = "".join(f"<tr>{_cells('td', row, kinds)}</tr>" for row in self.rows)
        field = (
            f'<input type="search" placeholder="filter {len(self.rows)} rows" '
            f'aria-label="filter rows" data-table="table-{number}">'
        )
        return (
            f"<h2>{html.escape(self.title)}</h2>{field if len(self.rows) > 20 else ''}"
            f'<div class="scroll"><table id="table-{number}"><thead><tr>{heads}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )


def _cells(tag: str, values: Sequence[object], kinds: Sequence[str]) -> str:
    return "".join(
        f"<{tag}{kind}>{html.escape(str(value))}</{tag}>"
        for value, kind in zip(values, kinds, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of plotly.

    Attributes:
        title: a heading.
        data: plotly's traces.
        layout: plotly's layout, without colours.
    """

    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]

    def to_html(self, number: int) -> str:
        """Return the element and its data."""
        value = json.dumps({"data": list(self.data), "layout": dict(self.layout)})
        text = value.replace("<", "\\u003c")  # no tag inside a string can end the element
        return (
            f'<h2>{html.escape(self.title)}</h2><div class="figure" id="figure-{number}"></div>'
            f'<script type="application/json" data-figure="figure-{number}">{text}</script>'
        )


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


def _plotly() -> Any:
    try:
        # a name in a string: plotly has no types, and is needed here alone
        return importlib.import_module("plotly.offline")
    except ImportError:
        raise PageError("--html needs plotly; pip install plotly") from None


def require_page(path: Path) -> None:
    """Check, before a long computation, that a page can be written.

    Raises:
        PageError: if plotly is not installed, or there is no folder for the file.
    """
    _plotly()
    require_folder(path)


def require_folder(path: Path) -> None:
    """Check that there is a folder for the file.

    Raises:
        PageError: if there is none.
    """
    if not path.absolute().parent.is_dir():
        raise PageError(f"{path} cannot be written: there is no folder {path.parent}")


def write_page(path: Path, title: str, parts: Iterable[Text | Table | Figure]) -> None:
    """Write a page.

    Raises:
        PageError: if plotly is not installed, or the file cannot be written.
    """
    script = _plotly().get_plotlyjs()
    body = "\n".join(part.to_html(number) for number, part in enumerate(parts))
    text = (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{body}\n"
        f"<script>{script}</script>\n<script>{_DRAW}</script></body></html>\n"
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PageError(f"{path} cannot be written: {error.strerror}") from error


_STYLE = """
:root { --back: #fff; --text: #1c1e21; --pale: #5b6068; --line: #d6d9de; --head: #f3f4f6; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14161a; --text: #e4e6eb; --pale: #a6abb5; --line: #3a3f47; --head: #22262d; }
}
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  max-width: 75rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2rem; font-size: 1.15rem; }
pre { overflow-x: auto; background: var(--head); padding: .75rem; border-radius: .3rem; }
.scroll { overflow: auto; max-height: 32rem; border: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left; }
th { position: sticky; top: 0; background: var(--head); }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; }
input { margin-bottom: .4rem; padding: .3rem; width: min(100%, 20rem); box-sizing: border-box;
  background: var(--back); color: inherit; border: 1px solid var(--pale); }
input::placeholder { color: var(--pale); opacity: 1; }
"""

_DRAW = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function draw() {
  const line = dark.matches ? "#3a3f47" : "#d6d9de", text = dark.matches ? "#e4e6eb" : "#1c1e21";
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true};
  for (const each of document.querySelectorAll("script[data-figure]")) {
    const {data, layout} = JSON.parse(each.textContent);
    for (const trace of data) if (trace.error_y) trace.error_y.color = text;
    // The legend is above, where no title of an axis is; it has a line per name if that is narrow.
    const names = new Set(data.map(each => each.name)).size, narrow = innerWidth < 600;
    const full = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {color: text}, margin: {t: 20, r: 20, b: 30}, legend: {orientation: "h",
      y: 1, yanchor: "bottom", maxheight: 1}, ...layout};
    full.height = (layout.height ?? 450) + (narrow && names > 1 ? 20 * names : 0);
    for (const name of ["xaxis", "yaxis"]) full[name] = {...axis, ...layout[name]};
    Plotly.react(each.dataset.figure, data, full, {responsive: true, displaylogo: false});
  }
}
draw();
dark.addEventListener("change", draw);
for (const field of document.querySelectorAll("input[data-table]")) {
  field.addEventListener("input", () => {
    const wanted = field.value.toLowerCase();
    for (const row of document.getElementById(field.dataset.table).tBodies[0].rows)
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}
"""
