"""The figures of a point as rows of text: for the terminal and for Markdown alike.

Owns which columns there are, their order and their units. Contestants are ranked by their median
step; one whose losses are not the unsharded model's stands below, without a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullshard_bench.format import as_bytes, as_ms, as_number, as_ratio
from fullshard_bench.result import Entry, Figures, Point, RunResult

__all__ = ["heads_of", "notes_of", "ordered", "rows_of", "title_of", "verified_of"]

_BEYOND, _LEFT = "beyond unsharded ms", "left the host"

_HEADS = (
    "",
    "contestant",
    "losses",
    "step ms",
    "x unsharded",
    _BEYOND,
    "items/s",
    "exposed comm. ms",
    "host us/group",
    "moved",
    _LEFT,
    "copied",
    "padding",
    "peak memory",
)

_WIDE_HEADS = (
    "",
    "contestant",
    "step ms",
    "host over unsharded ms",
    "host us/group",
    "construction ms",
    "collectives",
    "moved",
    "copied",
    "held",
    "peak memory",
)

_MARKS = {"ok": "agree", "wrong": "WRONG", "failed": "FAILED", "unchecked": "-"}


def title_of(run: RunResult, point: Point) -> str:
    """The measurements at this point."""
    if point.kind == "wide":
        alone = f"{run.name}, one rank of {point.ranks}"
        if run.wide_group == "fake":
            return f"{alone} over torch's `fake` group: gathers copy their input for each rank"
        return f"{alone}: nothing is moved"
    kind = "replicas x shards" if "x" in point.mesh else "shards"
    return f"{run.name}, mesh {point.mesh} ({kind}), {point.ranks} rank(s)"


def ordered(point: Point) -> list[tuple[str, Entry]]:
    """Rank and entry of each contestant; an unranked row has an empty rank."""
    ranked = [each for each in point.entries if each.is_ranked]
    ranked.sort(key=lambda each: each.derived.step_ms.value if each.derived else 0.0)
    rows = [(str(place), each) for place, each in enumerate(ranked, start=1)]
    return rows + [("", each) for each in point.entries if not each.is_ranked]


def heads_of(point: Point) -> list[str]:
    """Return the heads of its columns, without figures that were not measured there."""
    heads = _WIDE_HEADS if point.kind == "wide" else _HEADS
    return [heads[column] for column in _columns(point)]


def rows_of(point: Point) -> list[list[str]]:
    """A row for each contestant, under `heads_of(point)`."""
    make = _wide_row if point.kind == "wide" else _mesh_row
    rows = [make(place, entry) for place, entry in ordered(point)]
    return [[row[column] for column in _columns(point)] for row in rows]


def _columns(point: Point) -> list[int]:
    """Which of all columns are shown: results from before some figures lack them."""
    if point.kind == "wide":
        return list(range(len(_WIDE_HEADS)))
    there = {
        _BEYOND: any(each.derived and each.derived.beyond_ms for each in point.entries),
        _LEFT: any(each.figures and each.figures.left_bytes >= 0 for each in point.entries),
    }
    return [column for column, head in enumerate(_HEADS) if there.get(head, True)]


def _mesh_row(place: str, entry: Entry) -> list[str]:
    figures, derived = entry.figures, entry.derived
    mark = _MARKS[entry.status]
    if figures is None or derived is None:
        return [place, entry.name, mark, *["-"] * (len(_HEADS) - 3)]
    # A wrong contestant's time would only mislead.
    timed = entry.is_ranked
    return [
        place,
        entry.name,
        mark,
        as_ms(derived.step_ms) if timed else "not ranked",
        as_ratio(derived.over_unsharded) if timed else "-",
        as_ms(derived.beyond_ms) if timed else "-",
        as_number(derived.items_per_s) if timed else "-",
        as_ms(derived.exposed_ms) if timed else "-",
        as_number(derived.host_us_per_group) if timed else "-",
        as_bytes(_moved(figures)),
        as_bytes(figures.left_bytes),
        as_bytes(figures.copied_bytes),
        f"{figures.padding_percent:.1f} %" if figures.groups else "-",
        _memory(figures),
    ]


def _wide_row(place: str, entry: Entry) -> list[str]:
    """A row of a wide world."""
    figures, derived = entry.figures, entry.derived
    if figures is None or derived is None:
        return [place, entry.name, _MARKS[entry.status], *["-"] * (len(_WIDE_HEADS) - 3)]
    return [
        place,
        entry.name,
        as_ms(derived.step_ms),
        as_ms(derived.host_over_ms),
        as_number(derived.host_us_per_group),
        as_number(figures.construction_ms, 1),
        str(sum(each.count for each in figures.collectives.values())),
        as_bytes(_moved(figures)),
        as_bytes(figures.copied_bytes),
        as_bytes(figures.memory["held"]),
        _memory(figures),
    ]


def _moved(figures: Figures) -> int:
    return sum(each.nbytes for each in figures.collectives.values())


def _memory(figures: Figures) -> str:
    reserved = figures.memory.get("reserved")
    text = as_bytes(figures.memory["peak"])
    return text if reserved is None else f"{text} ({as_bytes(reserved)} reserved)"


def verified_of(entries: Sequence[Entry]) -> list[str]:
    """Return the verdict of `verify` on each contestant, in lines; none where it was not asked."""
    return [
        f"{each.name}: {each.verification}" for each in entries if each.verification is not None
    ]


def notes_of(entries: Sequence[Entry]) -> list[str]:
    """Why a contestant is wrong or failed, and what needs an explanation, one line each."""
    notes = [f"{each.name}: {each.status}: {each.reason}" for each in entries if each.reason]
    return notes + [f"{each.name}: {_BELOW_ZERO}" for each in entries if _is_below_zero(each)]


_BELOW_ZERO = (
    "exposed communication below 0: the same step with collectives that move nothing packs and"
    " copies what the real step, through memory that ranks share, uses where it lies; so the real"
    " one waits for less than that work takes"
)


def _is_below_zero(entry: Entry) -> bool:
    exposed = None if entry.derived is None else entry.derived.exposed_ms
    return entry.is_ranked and exposed is not None and exposed.high < 0
