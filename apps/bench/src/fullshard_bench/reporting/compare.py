"""Differences between two results: times beyond noise, and counts that changed."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rich.console import Console

from fullshard_bench.errors import BenchError
from fullshard_bench.records.conversion import to_table
from fullshard_bench.records.result import Entry, Figures, Point, Result, RunResult
from fullshard_bench.records.statistics import Estimate
from fullshard_bench.reporting.format import as_bytes, as_ms, as_number
from fullshard_bench.reporting.terminal import print_table
from fullshard_bench.settings import Settings

__all__ = ["Change", "changes", "changes_as_json", "compare"]

_HEADS = ("beyond noise", "what", "contestant", "figure", "before", "after", "change")

_DEFAULTS = to_table(Settings())  # of what an older result does not name

Change = tuple[str, ...]
"""A row under the heads: first a mark.

`!` where the difference is beyond noise; `?` where the measurement is inconclusive: it can neither
show a difference nor exclude one of more than 5 %.
"""

_SAME = 0.05  # a relative difference that is called none


def compare(before: Result, after: Result, console: Console) -> list[Change]:
    """Print what both results have, side by side; return the rows.

    Raises:
        BenchError: they have nothing in common.
    """
    rows = list(changes(before, after))
    if not rows:
        raise BenchError("the two results have no contestant on the same model and mesh in common")
    if before.machine != after.machine:
        console.print("! the machines differ: times cannot be compared", style="bold red")
    for name, version in before.versions.items():
        if after.versions.get(name) != version:
            console.print(f"  {name}: {version} -> {after.versions.get(name)}", highlight=False)
    print_table(console, "Changes", _HEADS, [list(row) for row in rows])
    beyond, open_ = (sum(row[0] == mark for row in rows) for mark in "!?")
    console.print(f"{beyond} of {len(rows)} figures differ beyond noise", highlight=False)
    if open_:
        console.print(
            f"{open_} are inconclusive (?): a change of more than {_SAME:.0%} is neither shown nor"
            " excluded; measure more rounds (--steps), on a quiet machine",
            highlight=False,
        )
    return rows


def changes_as_json(before: Result, after: Result) -> str:
    """The rows of `changes` as JSON, each an object by the heads of the table."""
    rows = [dict(zip(_HEADS, row, strict=True)) for row in changes(before, after)]
    return json.dumps(rows, indent=2)


def changes(before: Result, after: Result) -> Iterator[Change]:
    """A row for each figure that both results have."""
    for old_run in before.runs:
        new_run = next((each for each in after.runs if _same(old_run, each)), None)
        if new_run is None:
            continue
        for old_point in old_run.points:
            new_point = new_run.point(old_point.kind, old_point.mesh)
            if new_point is not None:
                yield from _of_point(old_run.name, old_point, new_point)


def _same(old: RunResult, new: RunResult) -> bool:
    """Return whether both trained equally, for any contestants and any number of timed steps."""
    free = (
        "impl",
        "steps",
        "checked",
        "exposed",
        "verify",
        "layout",
    )  # older results name a layout
    first, second = (
        {key: value for key, value in {**_DEFAULTS, **each.settings}.items() if key not in free}
        for each in (old, new)
    )
    return (old.name, first) == (new.name, second)


def _of_point(name: str, old: Point, new: Point) -> Iterator[Change]:
    what = f"{name}, {old.kind} {old.mesh}"
    for entry in old.entries:
        other = new.entry(entry.name)
        if other is None:
            continue
        if entry.status != other.status:
            yield ("!", what, entry.name, "status", entry.status, other.status, "")
        if entry.is_ranked and other.is_ranked:
            yield from _of_entry((what, entry.name), entry, other)


def _of_entry(where: tuple[str, str], old: Entry, new: Entry) -> Iterator[Change]:
    assert old.derived is not None
    assert new.derived is not None
    for figure, before, after in (
        ("step ms", old.derived.step_ms, new.derived.step_ms),
        ("exposed ms", old.derived.exposed_ms, new.derived.exposed_ms),
        ("host over unsharded ms", old.derived.host_over_ms, new.derived.host_over_ms),
    ):
        if before is not None and after is not None:
            mark = _mark(before, after)
            change = _percent(before.value, after.value)
            yield (mark, *where, figure, as_ms(before), as_ms(after), change)
    assert old.figures is not None
    assert new.figures is not None
    for figure, before_count, after_count, is_bytes in _counts(old.figures, new.figures):
        if before_count != after_count:
            text = [as_bytes(n) if is_bytes else as_number(n) for n in (before_count, after_count)]
            yield ("!", *where, figure, *text, _percent(before_count, after_count))


def _counts(old: Figures, new: Figures) -> Iterator[tuple[str, int, int, bool]]:
    yield "copied", old.copied_bytes, new.copied_bytes, True
    for kind in sorted({*old.collectives, *new.collectives}):
        first, second = old.collectives.get(kind), new.collectives.get(kind)
        counts = (first.count if first else 0, second.count if second else 0)
        sizes = (first.nbytes if first else 0, second.nbytes if second else 0)
        yield f"{kind} calls", *counts, False
        yield f"{kind} moved", *sizes, True
    yield "peak memory", old.memory["peak"], new.memory["peak"], True


def _mark(before: Estimate, after: Estimate) -> str:
    """Compare two intervals; see `Change`."""
    if before.high < after.low or after.high < before.low:
        return "!"
    if before.low <= 0:
        return "?"
    least, most = after.low / before.high - 1, after.high / before.low - 1
    return "" if least >= -_SAME and most <= _SAME else "?"


def _percent(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before > 0 else "-"
