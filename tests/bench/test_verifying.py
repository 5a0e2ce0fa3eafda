"""`--verify`: what `fullshard.preflight.verify` says of contestants, and which it cannot run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.measured import measured, settings
from fullshard_bench.cli import main
from fullshard_bench.records.result import Entry
from fullshard_bench.running.suites import SUITES
from support.products import few


def _entries(**options: Any) -> dict[str, Entry]:
    point = measured(settings(verify=True, **options)).point
    return {entry.name: entry for entry in point.entries}


def _said(entry: Entry) -> tuple[str, str]:
    assert entry.verification is not None
    return entry.verification.outcome, entry.verification.reason


_OPTIONS: list[dict[str, Any]] = [
    {"model": "gpt-tiny:layers=1,width=16,vocabulary=32"},
    {"model": "experts:layers=1,width=16,count=2,heads=2", "tokens": 8},
    {"model": "bench.stand_ins:small", "rows": 2, "clip": 0.0},
    {"checkpointing": True, "offload": True},
]


@pytest.mark.parametrize("options", few(_OPTIONS, _OPTIONS[0]), ids=",".join)
def test_contestants_that_train_as_the_unsharded_model_are_equal_under(
    options: dict[str, Any],
) -> None:
    impl = ("fullshard", "torch", "ddp")
    found = _entries(impl=impl, **options)
    assert {name: (each.status, _said(each)[0]) for name, each in found.items()} == dict.fromkeys(
        impl, ("ok", "equal")
    )


def test_a_fault_that_no_loss_shows_is_named_and_the_contestant_not_ranked() -> None:
    impl = ("fullshard", "bench.stand_ins:nearly")
    assert {entry.status for entry in measured(settings(impl=impl)).point.entries} == {"ok"}
    right, wrong = _entries(impl=impl).values()
    assert _said(right)[0] == "equal"
    outcome, reason = _said(wrong)
    assert outcome == "different"
    assert reason.startswith("gradient of step 0: ")
    assert reason.endswith("gradients scaled by one factor")
    assert (wrong.status, wrong.reason, wrong.is_ranked) == ("wrong", reason, False)


@pytest.mark.matrix
def test_contestants_that_it_cannot_run_are_said_with_the_reason_and_still_measured() -> None:
    impl = ("none", "bench.stand_ins:right", "bench.stand_ins:failing")
    plain, combining, failing = _entries(impl=impl).values()
    assert _said(plain) == (
        "not run",
        "its ranks train apart, so it is not the model trained on all batches",
    )
    assert "combines gradients itself" in _said(combining)[1]
    assert _said(failing) == ("not run", "RuntimeError: out of luck")
    assert [each.status for each in (plain, combining, failing)] == ["ok", "ok", "failed"]
    (masters,) = _entries(impl=("ddp",), dtype="bfloat16").values()
    assert "float32 copies" in _said(masters)[1]


@pytest.mark.matrix
def test_a_policy_of_lower_bits_is_compared_in_these() -> None:
    found = _entries(impl=("fullshard", "torch"), dtype="bfloat16", reduce_dtype="float32")
    assert {_said(each)[0] for each in found.values()} == {"equal"}


def test_without_the_option_nothing_is_verified() -> None:
    point = measured(settings(impl=("fullshard",))).point
    assert point.entries[0].verification is None
    assert not any(run.settings.verify for runs in SUITES.values() for run in runs)


def test_a_suite_is_verified_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def note(runs: Any, *_: Any) -> SimpleNamespace:
        asked.extend(run.settings.verify for run in runs)
        return SimpleNamespace(runs=[])

    monkeypatch.setattr("fullshard_bench.cli.execute", note)
    assert main(["suite", "cpu", "--verify"]) == 0
    assert asked == [True] * len(SUITES["cpu"])
    asked.clear()
    assert main(["suite", "cpu"]) == 0
    assert asked == [False] * len(SUITES["cpu"])
