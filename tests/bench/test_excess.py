"""Ratios of differences: what cancels, what is drawn together, and how often they are right."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap

from fullshard_bench.records.statistics import (
    Estimate,
    Excess,
    difference,
    excess_growth,
    excess_ratio,
    median,
    ratio,
)
from support.products import few

whole = st.integers(min_value=1, max_value=1000)


def _excess(values: Iterable[float], base: Iterable[float]) -> Excess:
    return Excess(values=list(values), base=list(base))


def _contains(found: Estimate, value: float) -> bool:
    return found.low <= value <= found.high


def test_it_is_the_quotient_of_differences_of_medians() -> None:
    plain = [10.0, 11.0, 12.0]
    found = excess_ratio(_excess([14.0, 13.0, 90.0], plain), _excess([23.0, 17.0, 24.0], plain))
    assert found.value == (14 - 11) / (23 - 11)
    # A resample is three of three rounds: all 27 can be drawn, and the extremes are rare.
    quotients = sorted(
        (np.median([[14, 13, 90][i] for i in rows]) - np.median([[10, 11, 12][i] for i in rows]))
        / (np.median([[23, 17, 24][i] for i in rows]) - np.median([[10, 11, 12][i] for i in rows]))
        for rows in np.ndindex(3, 3, 3)
    )
    assert found.low in quotients
    assert found.high in quotients
    assert found.low == quotients[0]  # seven of 27: the median round is the first
    assert found.high == quotients[-1]


def _over(x: Any, y: Any, axis: int) -> Any:
    return np.median(x, axis=axis) / np.median(y, axis=axis)


def _less(x: Any, y: Any, axis: int) -> Any:
    return np.median(x, axis=axis) - np.median(y, axis=axis)


def _quotient(x: Any, y: Any, z: Any, axis: int) -> Any:
    return _less(y, x, axis) / _less(z, x, axis)


@pytest.mark.parametrize(
    ("ours", "statistic", "needs"),
    [
        (median, np.median, 1),
        (ratio, _over, 2),
        (difference, _less, 2),
        (lambda x, y, z: excess_ratio(_excess(y, x), _excess(z, x)), _quotient, 3),
    ],
    ids=["median", "ratio", "difference", "excess_ratio"],
)
def test_intervals_are_those_of_the_percentile_bootstrap_of_scipy(
    ours: Any, statistic: Any, needs: int
) -> None:
    generator = np.random.default_rng(5)
    together = generator.normal(0.0, 3.0, (40, 1))  # noise that all contestants of a round share
    rounds = (generator.normal((20.0, 25.0, 40.0), 1.0, (40, 3)) + together).T[:needs]
    level: dict[str, Any] = {"confidence_level": 0.9, "method": "percentile", "rng": 1}
    theirs = bootstrap(rounds, statistic, paired=True, **level).confidence_interval
    found = ours(*rounds)
    # scipy draws 9999 other resamples; ours are 1000.
    tolerance = 0.1 * (theirs.high - theirs.low)
    assert found.low == pytest.approx(theirs.low, abs=tolerance)
    assert found.high == pytest.approx(theirs.high, abs=tolerance)


@given(st.lists(whole, min_size=1, max_size=40), whole, whole)
def test_what_falls_on_all_contestants_of_a_round_cancels(
    noise: list[int], ours: int, theirs: int
) -> None:
    plain = [float(each) for each in noise]
    found = excess_ratio(
        _excess([each + ours for each in plain], plain),
        _excess([each + theirs for each in plain], plain),
    )
    assert (found.low, found.value, found.high) == (ours / theirs,) * 3


@settings(max_examples=30)
@given(st.integers(min_value=0, max_value=10**6), st.integers(min_value=5, max_value=60))
def test_the_value_lies_in_its_interval(seed: int, rounds: int) -> None:
    plain, ours, theirs = np.random.default_rng(seed).normal((10, 15, 30), 1.0, (rounds, 3)).T
    pair = _excess(ours, plain), _excess(theirs, plain)
    for found in (excess_ratio(*pair), excess_growth(*pair, in_turns=False)):
        assert _contains(found, found.value)


def test_measurements_with_rounds_of_their_own_are_drawn_independently() -> None:
    noise = np.random.default_rng(0).normal(10.0, 1.0, 30)
    same = _excess(noise + np.linspace(4, 6, 30), noise)
    paired, apart = (excess_growth(same, same, in_turns=each) for each in (True, False))
    assert (paired.low, paired.high) == (1.0, 1.0)
    assert apart.low < 1.0 < apart.high
    assert apart.value == 1.0


def test_measurements_with_rounds_of_their_own_may_differ_in_their_number() -> None:
    short, long = _excess([3.0] * 5, [1.0] * 5), _excess([5.0] * 9, [1.0] * 9)
    assert excess_growth(short, long, in_turns=False).value == 0.5
    with pytest.raises(ValueError, match="5 and 9 rounds"):
        excess_growth(short, long, in_turns=True)
    with pytest.raises(ValueError, match="5 and 4 rounds"):
        excess_ratio(_excess([1.0] * 5, [1.0] * 4), short)


@pytest.mark.parametrize(("negative", "reaches"), [(2, False), (14, True)])
def test_the_interval_reaches_infinity_where_the_other_excess_may_be_none(
    negative: int, reaches: bool
) -> None:
    rounds, plain = 31, [10.0] * 31
    theirs = [9.0] * negative + [12.0] * (rounds - negative)
    found = excess_ratio(_excess([11.0] * rounds, plain), _excess(theirs, plain))
    assert found.value == 0.5
    assert math.isinf(found.high) == reaches
    assert not math.isnan(found.low)


def test_without_any_excess_on_the_other_side_all_is_infinite() -> None:
    plain = [10.0] * 5
    found = excess_ratio(_excess([11.0] * 5, plain), _excess(plain, plain))
    assert (found.low, found.value, found.high) == (math.inf,) * 3


@pytest.mark.parametrize("size", few([1.0, 4.0], 4.0))
def test_about_nine_of_ten_intervals_contain_the_truth(size: float) -> None:
    """Of Gaussian rounds, with noise of `size` on all contestants and 1 of each one's own.

    Noise on all that is much the larger makes more of them contain it, never fewer.
    """
    generator = np.random.default_rng(20240301)
    together = independent = 0
    trials, rounds = 150, 30
    for _ in range(trials):
        noise = generator.normal(0.0, size, (2, rounds, 1))
        times = generator.normal((20.0, 25.0, 40.0), 1.0, (2, rounds, 3)) + noise
        (plain, ours, theirs), (other_plain, _, other_theirs) = times.transpose(0, 2, 1)
        paired = excess_ratio(_excess(ours, plain), _excess(theirs, plain))
        others = _excess(other_theirs, other_plain)
        apart = excess_growth(_excess(ours, plain), others, in_turns=False)
        together += _contains(paired, 0.25)
        independent += _contains(apart, 0.25)
    for count in (together, independent):
        assert count / trials >= 0.83
        assert size > 1 or count / trials <= 0.97


def test_it_is_narrower_than_what_two_intervals_allow_at_their_ends() -> None:
    generator = np.random.default_rng(7)
    plain, ours, theirs = generator.normal((20.0, 25.0, 40.0), 1.0, (30, 3)).T
    first, second = difference(ours, plain), difference(theirs, plain)
    widest = first.high / second.low - first.low / second.high
    found = excess_ratio(_excess(ours, plain), _excess(theirs, plain))
    assert found.high - found.low < widest
