"""``fit``: what is taken within a budget, and what is said if nothing is."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.preflight import CHOICES, BudgetError, Choice, Fit, fit, parse_bytes, plan
from fullshard.preflight.planning.choices import blocks_of
from support.modules import Stack


def stack() -> Stack:
    return Stack(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(2))


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def _fit(budget: int | str | None, **options: Any) -> Fit:
    given: dict[str, Any] = {"mesh": 8, "batch": torch.empty(256, 64), **options}
    return fit(stack, loss=_loss, budget=budget, **given)


def test_the_first_choice_that_fits_is_taken_and_shards_as_planned() -> None:
    everything = _fit(2**40)
    assert everything.choice == CHOICES[0]
    assert len(everything.tried) == 1
    less = _fit(everything.plan.peak - 1)
    assert less.plan.peak < everything.plan.peak
    assert [choice for choice, _ in less.tried] == list(CHOICES[: len(less.tried)])
    again = plan(
        stack, torch.empty(256, 64), _loss, mesh=8, shard=partial(less.choice.shard, blocks_of)
    )
    assert again.peak == less.plan.peak


@pytest.mark.matrix
def test_on_a_device_the_quickest_that_fits_is_taken() -> None:
    slowest_first = _fit(2**40, device="h100", choices=CHOICES[::-1])
    assert len(slowest_first.tried) == len(CHOICES)
    times = [found.step_time or 0.0 for _, found in slowest_first.tried]
    assert all(times)
    assert slowest_first.plan.step_time == min(times)
    whole = _fit(None, device="h100", choices=CHOICES[:1])
    assert whole.plan.peak < 80e9


@pytest.mark.matrix
def test_micro_batches_cut_the_batch() -> None:
    one, four = (_fit(2**40, choices=[Choice(micro_batches=each)]).plan.peak for each in (1, 4))
    assert four < one


def test_a_budget_that_nothing_fits_is_said_with_the_least() -> None:
    two: dict[str, Any] = {"device": "h100", "choices": CHOICES[-2:]}
    least = min(found.peak for _, found in _fit(2**40, **two).tried)
    with pytest.raises(BudgetError, match=r"none of 2 choices fits .* the least is"):
        _fit(least - 1, **two)


def test_a_budget_below_the_shards_is_said_after_one_plan() -> None:
    with pytest.raises(BudgetError, match=r"shards and optimizer state alone are .* on each of 8"):
        _fit("1KiB")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budget": None}, r"no budget=, and device=None does not say"),
        ({"budget": 1, "choices": []}, "no choices"),
        ({"budget": 1, "choices": [Choice(micro_batches=3)]}, "3 micro-batches do not divide"),
    ],
)
def test_what_cannot_be_fitted_is_said(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _fit(**wrong)


def test_sizes_are_read_in_binary_and_decimal_units() -> None:
    assert parse_bytes("80GiB") == 80 * 2**30
    assert parse_bytes("1.5 MiB") == 3 * 2**19
    assert parse_bytes("70GB") == 70 * 10**9
    assert parse_bytes("1 kB") == 1000
    assert parse_bytes("512") == 512
    for wrong in ("80gb", "80G", "much", "", "-1GiB"):
        with pytest.raises(ValueError, match="such as 80GiB"):
            parse_bytes(wrong)
