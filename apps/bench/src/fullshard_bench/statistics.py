"""Medians of noisy times, and how sure they are.

Owns the numbers' definitions. An interval is the middle 90 % of the medians of 1000 resamples,
drawn alike every time. Contestants take turns step by step, so a resample draws whole rounds, and
what a noisy machine does to one round falls on all contestants alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Estimate", "difference", "median", "ratio"]

_RESAMPLES = 1000
_SEED = 20240229

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A value and its 90 % interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        return Estimate(value=self.value * factor, low=self.low * factor, high=self.high * factor)


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


def _paired(
    values: Sequence[float], others: Sequence[float]
) -> tuple[Numbers, Numbers, npt.NDArray[np.int64]]:
    if len(values) != len(others):
        raise ValueError(f"{len(values)} and {len(others)} rounds; both need the same ones")
    ours, theirs = np.asarray(values, dtype=np.float64), np.asarray(others, dtype=np.float64)
    return ours, theirs, _draws(len(ours))


def _draws(count: int) -> npt.NDArray[np.int64]:
    """Indices `[resamples, count]`: each row is a resample."""
    return np.random.default_rng(_SEED).integers(count, size=(_RESAMPLES, count))


def _estimate(value: float, resampled: Numbers) -> Estimate:
    low, high = np.quantile(resampled, (0.05, 0.95))
    return Estimate(value=value, low=float(low), high=float(high))
