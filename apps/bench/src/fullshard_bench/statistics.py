"""Medians of noisy times, and how sure they are.

Owns the numbers' definitions. An interval is the middle 90 % of what 1000 resamples say, drawn
alike every time. Contestants take turns step by step, so a resample draws whole rounds, and what a
noisy machine does to one round falls on all contestants alike. Refuses to combine intervals: a
function of several medians is computed in each resample, and has a separate interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Estimate", "Excess", "difference", "excess_growth", "excess_ratio", "median", "ratio"]

_RESAMPLES = 1000
_LOW, _HIGH = 50, 949  # of 1000 in order: a twentieth is left out on each side
_SEED = 20240229

Numbers = npt.NDArray[np.float64]
Draws = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value and its 90 % interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """Return the median of `values` less that of `base`, measured in equal rounds."""

    values: Sequence[float]
    base: Sequence[float]


def median(values: Sequence[float]) -> Estimate:
    """The median of `values`."""
    data = np.asarray(values, dtype=np.float64)
    return _estimate(float(np.median(data)), np.median(data[_draws(len(data))], axis=1))


def ratio(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The median of `values` over the median of `others`, of the same rounds."""
    ours, theirs, draws = _paired(values, others)
    resampled = np.median(ours[draws], axis=1) / np.median(theirs[draws], axis=1)
    return _estimate(float(np.median(ours) / np.median(theirs)), resampled)


def difference(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """The median of `values` less the median of `others`, of the same rounds."""
    ours, theirs, draws = _paired(values, others)
    resampled = np.median(ours[draws], axis=1) - np.median(theirs[draws], axis=1)
    return _estimate(float(np.median(ours) - np.median(theirs)), resampled)


def excess_ratio(ours: Excess, theirs: Excess) -> Estimate:
    """The excess `ours` over the excess `theirs`, all of the same rounds.

    Where `theirs` is not above 0 the ratio counts as infinite: an interval reaches infinity if more
        than 5 % of the resamples do, and is below no limit.
    """
    if len(ours.values) != len(theirs.values):
        raise ValueError(_other_rounds(len(ours.values), len(theirs.values)))
    draws = _draws(len(ours.values))
    return _over(_resampled(ours, draws), _resampled(theirs, draws))


def excess_growth(now: Excess, before: Excess, *, in_turns: bool) -> Estimate:
    """As `excess_ratio`, of two measurements.

    Their rounds are drawn together if the two took turns, else each has rounds of its own.
    """
    if in_turns:
        return excess_ratio(now, before)
    first, second = _draws(len(now.values)), _draws(len(before.values), stream=1)
    return _over(_resampled(now, first), _resampled(before, second))


def _resampled(excess: Excess, draws: Draws) -> Numbers:
    """The excess as it was measured, then in each resample."""
    values, base, _ = _paired(excess.values, excess.base)
    resampled = np.median(values[draws], axis=1) - np.median(base[draws], axis=1)
    return np.concatenate([[np.median(values) - np.median(base)], resampled])


def _over(ours: Numbers, theirs: Numbers) -> Estimate:
    there = theirs > 0
    found = np.where(there, ours / np.where(there, theirs, 1.0), np.inf)
    return _estimate(float(found[0]), found[1:])


def _paired(values: Sequence[float], others: Sequence[float]) -> tuple[Numbers, Numbers, Draws]:
    if len(values) != len(others):
        raise ValueError(_other_rounds(len(values), len(others)))
    ours, theirs = np.asarray(values, dtype=np.float64), np.asarray(others, dtype=np.float64)
    return ours, theirs, _draws(len(ours))


def _other_rounds(first: int, second: int) -> str:
    return f"{first} and {second} rounds; both need the same ones"


def _draws(count: int, stream: int = 0) -> Draws:
    """Indices `[resamples, count]`: each row is a resample. Another stream's are independent."""
    return np.random.default_rng(_SEED + stream).integers(count, size=(_RESAMPLES, count))


def _estimate(value: float, resampled: Numbers) -> Estimate:
    ordered = np.sort(resampled)  # np.quantile would make NaN of infinities
    return Estimate(value=value, low=float(ordered[_LOW]), high=float(ordered[_HIGH]))
