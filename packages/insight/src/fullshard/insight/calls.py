"""The words of reports for collectives that ranks are about to launch, and for the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fullshard.comm import EventKind
from fullshard.comm.spi import Launch

__all__ = ["said", "say_ranks", "says"]

_VERBS: dict[str, tuple[str, str, str]] = {
    EventKind.ALL_GATHER: ("gathers", "gather", "gathered"),
    EventKind.REDUCE_SCATTER: ("reduces", "reduce", "reduced"),
    EventKind.ALL_REDUCE: ("all-reduces", "all-reduce", "all-reduced"),
    EventKind.ALL_TO_ALL: ("exchanges", "exchange", "exchanged"),
}


def says(call: Launch, form: int = 0, *, full: bool = False) -> str:
    """The call in words: "gathers layers.17"; ``form`` 1: "gather ...", 2: "gathered ..."."""
    said = f"{_VERBS[call.kind][form]} {call.name or 'tensors without a name'}"
    return f"{said} ({call.nbytes} bytes, {call.detail})" if full else said


def said(calls: Mapping[int, Launch]) -> str:
    """The calls of all ranks, grouped, in the shortest form that distinguishes them."""
    distinct: dict[Launch, list[int]] = {}
    for rank, call in calls.items():
        distinct.setdefault(call, []).append(rank)
    full = len({says(call) for call in distinct}) < len(distinct)
    return ", ".join(
        f"{say_ranks(ranks)} {says(call, int(len(ranks) > 1), full=full)}"
        for call, ranks in distinct.items()
    )


def say_ranks(numbers: Iterable[int]) -> str:
    """Numbers of ranks in words, neighbours as one range: "rank 3", "ranks 0-2, 5"."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    parts = [f"{a}" if a == b else f"{a}-{b}" for a, b in runs]
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{'rank' if one else 'ranks'} {', '.join(parts)}"
