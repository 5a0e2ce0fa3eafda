"""Groups are killed and stopped at any moment; what the others train is what a replay trains."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from elastic.drill import RANKS, drill
from support.elastic.check import check_against_replay
from support.elastic.run import ElasticRun, Fault

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="replica groups need torchft")


def test_groups_that_are_killed_or_stopped_come_back_to_the_state_of_a_replay(
    tmp_path: Path,
) -> None:
    with ElasticRun(tmp_path, RANKS, between=torch.bfloat16) as run:
        for group in RANKS:
            run.start(group)
        while not run.together(3):
            run.follow()
        run.strike(Fault(kind="kill", group="b", rank=1, phase="backward"))
        run.strike(Fault(kind="stop", group="c", rank=0, phase="forward"))
        run.finish()
    assert run.restarts == 1, run.log
    assert check_against_replay(tmp_path, RANKS, torch.bfloat16) > 10


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random_moments_change_no_bit(tmp_path: Path, seed: int) -> None:
    print("\n".join(drill(tmp_path, seed=seed)))
