"""`checkpoint.memory`: a run that is cut off continues from the memory of hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fullshard.checkpoint import memory_runs
from fullshard_train.errors import TrainError
from fullshard_train.training.memory import HostMemory
from fullshard_train.training.trainer import Trainer
from support.ranks import distributed
from support.trainer.jobs import fit, full_weights, losses, small_config, small_trainer, untimed


class _Lost(Exception):
    """Stands for the loss of a host."""


def _cut_off(trainer: Trainer) -> Any:
    update = trainer._update

    def lost() -> Any:
        if trainer.step == 5:
            raise _Lost
        return update()

    return patch.object(trainer, "_update", lost)


@distributed(2)
def test_it_goes_on_as_a_run_that_nobody_cut_off(tmp_path: Path) -> None:
    config = small_config(
        train={"steps": 8, "evaluate_every": 8}, checkpoint={"every": 8, "memory": 2}
    )
    whole = small_trainer(config)
    fit(whole, tmp_path / "whole")
    # each rank is a host
    host = patch.dict(os.environ, {"GROUP_RANK": str(dist.get_rank())})
    root = tmp_path / str(dist.get_rank())
    trainer = small_trainer(config)
    with host, _cut_off(trainer):
        memory = HostMemory(trainer, tmp_path / "run", root)
        with pytest.raises(_Lost):
            fit(trainer, tmp_path / "run")
    memory.checkpoints.close()
    again = small_trainer(config)
    with host:
        other = HostMemory(small_trainer(config), tmp_path / "another run", root)
    assert other.restore() is None
    other.checkpoints.purge()
    with host:
        memory = HostMemory(again, tmp_path / "run", root)
    assert memory.restore() == 4
    fit(again, tmp_path / "again")
    expected = losses(untimed(tmp_path / "whole" / "metrics.jsonl"))
    found = losses(untimed(tmp_path / "again" / "metrics.jsonl"))
    assert found == {step: loss for step, loss in expected.items() if step > 4}
    weights = full_weights(again)
    assert all(each.equal(weights[name]) for name, each in full_weights(whole).items())
    assert memory_runs(root) == []


@distributed(2)
def test_a_run_that_finds_nothing_in_memory_trains_as_one_that_did_not_look(
    tmp_path: Path,
) -> None:
    config = small_config(
        train={"steps": 4, "evaluate_every": 4}, checkpoint={"every": 4, "memory": 2}
    )
    expected, trainer = small_trainer(config), small_trainer(config)
    fit(expected, tmp_path / "expected")
    host = patch.dict(os.environ, {"GROUP_RANK": str(dist.get_rank())})
    with host:
        memory = HostMemory(trainer, tmp_path / "run", tmp_path / str(dist.get_rank()))
    assert memory.restore() is None
    fit(trainer, tmp_path / "run")
    found = losses(untimed(tmp_path / "run" / "metrics.jsonl"))
    assert found == losses(untimed(tmp_path / "expected" / "metrics.jsonl"))


@distributed(2)
def test_a_folder_that_cannot_be_used_is_an_error_of_the_run(tmp_path: Path) -> None:
    trainer = small_trainer(small_config(checkpoint={"memory": 1}))
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match=r"checkpoint.memory: .*rank 0: .*Error"):
        HostMemory(trainer, tmp_path / "run", tmp_path / "file")
