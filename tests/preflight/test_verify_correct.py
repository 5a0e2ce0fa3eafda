"""``verify`` reports no correct program."""

from __future__ import annotations

from typing import Any

import pytest

from fullshard.preflight import Verdict, verify
from support.products import few
from support.ranks import run_on_ranks
from support.verification.correct import CORRECT, batch, loss, net, shard

_FIRST = [
    "plain",
    "accumulation inside the loss",
    "hybrid",
    "FSDP1",
    "dicts and keywords",
    "checkpoints with dropout",
    "tied weights",
    "spectral norm",
    "a count of forwards",
    "parameters in bfloat16",
    "groups of parameters",
    "bfloat16",
    "Muon",
]


def _verdict_of(name: str, layers: bool) -> Verdict:
    right: dict[str, Any] = {
        "build_model": net,
        "shard": shard,
        "batch": batch,
        "loss": loss,
        "steps": 3,
    }
    return verify(**{**right, **CORRECT[name].program}, layers=layers)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's own, of views
@pytest.mark.cross
@pytest.mark.parametrize("layers", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("name", few(CORRECT, *_FIRST))
def test_a_correct_program_is_equal(name: str, layers: bool) -> None:
    for verdict in run_on_ranks(_verdict_of, CORRECT[name].ranks, name, layers):
        assert verdict.equal, str(verdict)
        # sums of two ranks round nowhere, and by layer a clipped update is not compared
        exact = layers and name == "clipped"
        assert (verdict.largest is None) == exact
