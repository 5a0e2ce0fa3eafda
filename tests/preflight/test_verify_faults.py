"""``verify`` finds each fault of the table, names its cause, and names no other."""

from __future__ import annotations

from typing import Any

import pytest

from fullshard.preflight import Phase, Verdict, VerificationFailed, verify
from support.products import few
from support.ranks import distributed, run_on_ranks
from support.verification.fault import Fault, batch, build, loss, shard
from support.verification.faults import FAULTS

# Of each kind of cause the quickest to find, and one for each phase; the rest in the matrix.
_FIRST = {
    "dropout",
    "a buffer in 16 bits",
    "a buffer that is rounded",
    "tokens that rank 1 rolls",
    "positions by rank",
    "a causal mask that is lost",
    "dropout that is drawn again in backward",
    "a backward hook",
    "an embedding that is detached",
    "backwards that are not divided",
    "a parameter that is left out",
    "values changed after sharding",
    "frozen by sharding",
    "a tie that is broken",
    "a loss times the world size",
    "a scaled backward",
    "a penalty on the shard",
    "one gathered element off by 1 %",
    "reduced elements exchanged",
    "a gradient zeroed on one replica",
    "an optimizer that steps twice",
    "a rate of the sharded run alone",
    "betas of the sharded run alone",
}
_BY_LAYER = {Phase.LOSS: Phase.OUTPUT}


def _verdict_of(program: dict[str, Any]) -> Verdict:
    right = {"build_model": build, "shard": shard, "batch": batch, "loss": loss, "steps": 2}
    return verify(**{**right, **program})


@pytest.mark.cross
@pytest.mark.parametrize("layers", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize(
    "fault", few(FAULTS, *(fault for fault in FAULTS if fault.name in _FIRST)), ids=str
)
def test_a_planted_fault_is_found_and_its_cause_named(fault: Fault, layers: bool) -> None:
    verdicts = run_on_ranks(_verdict_of, fault.ranks, {**fault.program, "layers": layers})
    verdict, told = verdicts[0], str(verdicts[0])
    assert all(str(each) == told for each in verdicts), "all ranks have the same"
    if layers and fault.unseen:
        assert verdict.equal, told
        return
    assert verdict.first is not None
    phase = _BY_LAYER.get(fault.phase, fault.phase)
    assert verdict.first.phase is ((fault.by_layer or phase) if layers else fault.phase), told
    if not (layers and fault.by_layer):
        assert fault.at in (verdict.first.name, verdict.first.module, ""), told
    assert tuple(cause.name for cause in verdict.causes) == fault.causes, told
    assert all(cause.tested is not fault.fits for cause in verdict.causes), told
    with pytest.raises(VerificationFailed, match=verdict.first.phase):
        verdict.require()


@pytest.mark.parametrize("layers", [False, True], ids=["whole", "by layer"])
@distributed(2)
def test_a_difference_that_does_not_come_again_gets_no_cause(layers: bool) -> None:
    calls: list[None] = []

    def once(model: Any) -> None:
        shard(model)
        calls.append(None)
        if len(calls) == 1:
            model.set_requires_gradient_sync(False)

    verdict = _verdict_of({"shard": once, "layers": layers})
    assert verdict.first is not None and verdict.first.phase is Phase.MISSING
    assert not any(cause.tested for cause in verdict.causes), str(verdict)
    assert "did not come in the same place" in verdict.known[0]


@distributed(2)
def test_of_two_faults_the_first_that_shows_is_named() -> None:
    by_name = {fault.name: fault.program for fault in FAULTS}
    both = {**by_name["dropout"], **by_name["a rate of the sharded run alone"]}
    verdict = _verdict_of(both)
    assert [cause.name for cause in verdict.causes] == ["random numbers drawn per rank"]
    verdict = _verdict_of({**both, "aligned_seeds": True})
    assert [cause.name for cause in verdict.causes] == ["optimizer settings that are not the same"]


@distributed(2)
def test_what_is_known_says_how_many_elements_differ_and_in_whose_shards() -> None:
    off = next(fault for fault in FAULTS if fault.name == "one reduced element off")
    verdict = _verdict_of(off.program)
    assert verdict.known == (
        "1 of 54 elements of up.weight differ",
        "they lie in the shards of ranks [1]; those of ranks [0] agree",
    )
    assert "cause: not found\nknown: 1 of 54" in str(verdict)


def test_a_fault_has_one_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_each_phase_has_a_fault_that_runs_always() -> None:
    first = [fault for fault in FAULTS if fault.name in _FIRST]
    assert len(first) == len(_FIRST)
    assert {fault.phase for fault in first} == {fault.phase for fault in FAULTS}
