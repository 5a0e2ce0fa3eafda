"""Figures derived from raw figures: medians, ratios and differences between contestants."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fullshard_bench.result import Derived, Entry, Figures
from fullshard_bench.statistics import Estimate, difference, median, ratio

__all__ = ["DEFINITIONS", "derive"]

DEFINITIONS = (
    "step: forward, backward, clipping and fused AdamW, on the rank that took longest; medians over"
    " steps in which contestants took turns, with their 90 % interval",
    "unsharded step (none): as many processes, each training the plain model on its own batch at"
    " once, without communication, with as many threads",
    "beyond unsharded: the step less the unsharded step; left the host: bytes that a host sends"
    " over its link in a step of a run with --network, headers included, of the host that sends"
    " most",
    "exposed communication: the step less the same step with collectives that move nothing; below"
    " 0 where that other step packs and copies what the real one, through memory that ranks share,"
    " uses where it lies",
    "host time: until the host has queued the step whose collectives move nothing (on the CPU: that"
    " whole step, copies included), less that of the unsharded step; per group of parameters; over"
    " torch's `fake` group also what that group copies in a gather and a reduction",
    "intervals: the middle 90 % over 1000 resamples of whole rounds; a ratio of two differences is"
    " computed in each resample, infinite where the second is not above 0; on the CPU the wide"
    " worlds of a run take turns on one core, step by step, another one first in each round, and of"
    " two the same rounds are drawn",
)


def derive(entries: Sequence[Entry], *, items: int) -> tuple[Entry, ...]:
    """The entries with what follows from their figures and each other's.

    Args:
        entries: the contestants on one mesh.
        items: items of all ranks in a step.
    """
    measured = {
        each.name: each.figures
        for each in entries
        if each.figures is not None and each.figures.step_ms
    }
    plain, rival = measured.get("none"), measured.get("torch")
    return tuple(
        dataclasses.replace(each, derived=_derived(measured[each.name], plain, rival, items))
        if each.name in measured
        else each
        for each in entries
    )


def _derived(figures: Figures, plain: Figures | None, rival: Figures | None, items: int) -> Derived:
    step = median(figures.step_ms)
    host_over = None
    if plain is not None and figures.groups:
        host_over = difference(figures.host_ms, plain.host_ms)
    exposed = difference(figures.step_ms, figures.silent_ms) if figures.silent_ms else None
    return Derived(
        step_ms=_short(step),
        items_per_s=round(items / step.value * 1e3, 1),
        over_unsharded=_short(ratio(figures.step_ms, plain.step_ms)) if plain else None,
        over_torch=_short(ratio(figures.step_ms, rival.step_ms)) if rival else None,
        exposed_ms=_short(exposed) if exposed else None,
        host_over_ms=_short(host_over) if host_over else None,
        beyond_ms=_short(difference(figures.step_ms, plain.step_ms)) if plain else None,
        host_us_per_group=round(host_over.value * 1e3 / figures.groups, 2) if host_over else None,
    )


def _short(estimate: Estimate) -> Estimate:
    return Estimate(
        value=round(estimate.value, 5),
        low=round(estimate.low, 5),
        high=round(estimate.high, 5),
    )
