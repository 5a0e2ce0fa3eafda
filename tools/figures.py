"""Draws and tabulates the figures that README shows, from the newest records of the benchmark.

``python tools/figures.py`` writes ``docs/assets/ratios.svg`` and the table between the marks in
README.md and docs/index.md. Owns both. What is measured, and what counts as met, is
``fullshard_bench``'s; a test compares the pages with what this script makes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from fullshard_bench.records.result import read_result
from fullshard_bench.reporting.bars import Verdict, judge
from fullshard_bench.reporting.format import as_ratio

__all__ = ["PAGES", "PICTURE", "draw", "newest", "table", "verdicts", "with_table"]

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "assets" / "ratios.svg"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")

_MARKED = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_COLOURS = {"met": "#0b6e4f", "not met": "#d1495b", "inconclusive": "#edae49"}
_LEFT, _WIDTH, _ROW, _TOP = 590, 400, 24, 64
_MOST = 1.3  # the right end of the axis, a ratio


def newest(workload: str) -> Path:
    """The newest record of a set: ``cpu-set`` or ``network``."""
    found = (ROOT / "benchmarks").glob(f"{workload}_*.json")
    return max(found, key=lambda path: read_result(path).created)


def verdicts() -> list[Verdict]:
    """Each bar that one of the newest records measured, met or not."""
    found = [each for name in ("cpu-set", "network") for each in judge(read_result(newest(name)))]
    return [each for each in found if each.found is not None]


def table(found: Sequence[Verdict]) -> str:
    """A Markdown table: what was measured, the ratio with its interval, and the verdict."""
    lines = [
        "| fullshard / torch's `fully_shard` | ratio (90 % interval) | bar | |",
        "|---|---|---|---|",
    ]
    for each in found:
        word = each.word if each.word == "met" else f"**{each.word}**"
        lines.append(f"| {each.bar.what} | {as_ratio(each.found)} | {each.bar.limit:g} | {word} |")
    return "\n".join(lines) + "\n"


def with_table(page: str, found: Sequence[Verdict]) -> str:
    """A page with the table between its marks."""
    return _MARKED.sub(lambda marks: f"{marks[1]}\n{table(found)}\n{marks[2]}", page)


def draw(found: Sequence[Verdict]) -> str:
    """The ratios as SVG: a dot and its interval, and a tick where the bar is."""
    width, height = _LEFT + _WIDTH + 24, _TOP + _ROW * len(found) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        "<title>Ratios to torch's fully_shard with their 90 % intervals</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, "Ratio to torch's fully_shard, or as named: lower is better", size=14),
        _text(
            16,
            42,
            "Dot: ratio of medians; line: its 90 % interval; tick: the bar that it is held to.",
        ),
    ]
    bottom = _TOP + _ROW * len(found)
    for tenth in range(0, 13, 2):
        x = _x(tenth / 10)
        dark = "#757575" if tenth == 10 else "#e0e0e0"
        lines.append(f'<line x1="{x:g}" x2="{x:g}" y1="{_TOP - 6}" y2="{bottom}" stroke="{dark}"/>')
        lines.append(_text(x, bottom + 18, f"{tenth / 10:g}", anchor="middle"))
    for number, each in enumerate(found):
        lines += _row(_TOP + _ROW * number + _ROW // 2, each)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _row(y: int, verdict: Verdict) -> list[str]:
    found, colour = verdict.found, _COLOURS[verdict.word]
    assert found is not None
    limit = _x(verdict.bar.limit)
    return [
        _text(16, y + 4, verdict.bar.what),
        f'<line x1="{limit:g}" x2="{limit:g}" y1="{y - 8}" y2="{y + 8}" stroke="#424242"/>',
        f'<line x1="{_x(found.low):g}" x2="{_x(found.high):g}" y1="{y}" y2="{y}"'
        f' stroke="{colour}" stroke-width="3"/>',
        f'<circle cx="{_x(found.value):g}" cy="{y}" r="4" fill="{colour}"/>',
    ]


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    said = escape(words, quote=False)
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
        f' fill="#212121">{said}</text>'
    )


def _x(ratio: float) -> float:
    """A ratio's place; what lies beyond the axis is at its end."""
    inside = min(ratio, _MOST) if math.isfinite(ratio) else _MOST
    return round(_LEFT + _WIDTH * inside / _MOST, 1)


if __name__ == "__main__":
    rows = verdicts()
    PICTURE.write_text(draw(rows))
    for path in PAGES:
        path.write_text(with_table(path.read_text(), rows))
    print(f"{len(rows)} rows in {PICTURE} and {', '.join(map(str, PAGES))}")
