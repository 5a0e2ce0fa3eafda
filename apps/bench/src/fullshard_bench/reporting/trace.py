"""A step as a Chrome trace, for Perfetto or chrome://tracing: each rank a process, lanes in it.

Owns how events become spans. A *gather* lasts from when it was issued to when its parameters were
usable; a *reduction* from when it was issued to when its gradients were; *compute* is a group's
forward or backward between its hooks. An event without an end is an instant, on the lane of its
stream.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["LANES", "Events", "Span", "spans_of", "write_trace"]

Events = tuple[tuple[dict[str, Any], ...], ...]
"""The events of each rank, as `fullshard_bench.measuring.recording` returns them."""

LANES = ("compute", "gather", "reduce", "all_reduce", "copy_in", "current", "other")

# Of each event that begins a span: the event that ends it, the span's lane and its name.
_BEGINNINGS = {
    "unshard": ("wait", "gather", "gather"),
    "reduce": ("reduce_done", "reduce", "reduce"),
    "pre_forward": ("post_forward", "compute", "forward"),
    "pre_backward": ("post_backward", "compute", "backward"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Interval from `begin_us` to `end_us` of a group, on a lane."""

    lane: str
    what: str
    group: str
    begin_us: float
    end_us: float


def spans_of(events: Sequence[dict[str, Any]]) -> list[Span]:
    """The spans of one rank's step, in the order in which they began."""
    end_us = max((event["us"] for event in events), default=0.0)
    endings = {ending for ending, _, _ in _BEGINNINGS.values()}
    open_spans: dict[tuple[str, str], list[tuple[str, str, float]]] = {}
    spans = []
    for event in events:
        kind, name = event["kind"], event["name"]
        if kind in _BEGINNINGS:
            ending, lane, what = _BEGINNINGS[kind]
            open_spans.setdefault((ending, name), []).append((lane, what, event["us"]))
        elif kind in endings and open_spans.get((kind, name)):
            lane, what, begin = open_spans[kind, name].pop(0)
            spans.append(Span(lane=lane, what=what, group=name, begin_us=begin, end_us=event["us"]))
    for (_, name), left in open_spans.items():
        for lane, what, begin in left:
            spans.append(Span(lane=lane, what=what, group=name, begin_us=begin, end_us=end_us))
    return sorted(spans, key=lambda span: (span.begin_us, -span.end_us))


def write_trace(events: Events, path: Path) -> None:
    """Write all ranks' spans and instants as one trace."""
    entries: list[dict[str, Any]] = []
    for rank, of_rank in enumerate(events):
        entries.append(_name("process_name", rank, 0, f"rank {rank}"))
        entries += [_name("thread_name", rank, lane, text) for lane, text in enumerate(LANES)]
        for span in spans_of(of_rank):
            entries.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": LANES.index(span.lane),
                    "name": f"{span.what} {span.group}",
                    "cat": span.what,
                    "ts": span.begin_us,
                    "dur": round(span.end_us - span.begin_us, 1),
                }
            )
        entries += [_instant(event, rank) for event in of_rank if event["kind"] != "end"]
    document = {"traceEvents": entries, "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def _name(what: str, rank: int, lane: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": lane, "name": what, "args": {"name": text}}


def _instant(event: dict[str, Any], rank: int) -> dict[str, Any]:
    stream = event["stream"]
    lane = stream if stream in LANES else "compute" if not stream else "other"
    return {
        "ph": "i",
        "s": "t",
        "pid": rank,
        "tid": LANES.index(lane),
        "name": f"{event['kind']} {event['name']}",
        "cat": "event",
        "ts": event["us"],
        "args": {"bytes": event["nbytes"], "stream": stream},
    }
