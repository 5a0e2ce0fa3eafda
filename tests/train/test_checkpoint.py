"""Checkpoints: a resumed run is the run that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fullshard_train.checkpoints.checkpoint import load_checkpoint, read_position, resolve
from fullshard_train.checkpoints.store import CheckpointStore
from fullshard_train.errors import TrainError
from fullshard_train.settings.config import Config
from support.products import few
from support.ranks import distributed, run_on_ranks
from support.trainer.jobs import (
    Ran,
    damage,
    full_weights,
    losses,
    position_of,
    run,
    save,
    small_config,
    small_trainer,
)


def _stopped_and_resumed(config: Config, folder: Path) -> tuple[Ran, Ran]:
    """The uninterrupted run, and what a run that resumed it halfway did."""
    whole = run(config, folder / "whole")
    half = folder / "whole" / "checkpoints" / "step-00000002"
    return whole, run(config, folder / "resumed", resume=half)


@pytest.mark.parametrize(
    "parallel",
    few(
        [{"param_dtype": "float32"}, {"param_dtype": "bfloat16"}, {"wire_dtype": "int8"}],
        {"param_dtype": "float32"},
        {"wire_dtype": "int8"},
    ),
)
def test_a_resumed_run_repeats_the_rest_of_the_curve_bit_for_bit(
    tmp_path: Path, parallel: dict[str, str]
) -> None:
    config = small_config(parallel=parallel)
    for whole, resumed in run_on_ranks(_stopped_and_resumed, 2, config, tmp_path):
        found = [(record["kind"], record["step"]) for record in resumed.records]
        assert found == [("train", 3), ("train", 4), ("held_out", 4), ("checkpoint", 4)]
        assert resumed.records == [record for record in whole.records if record["step"] > 2]
        assert resumed.weights.keys() == whole.weights.keys()
        for name, weight in resumed.weights.items():
            assert weight.equal(whole.weights[name]), name


@pytest.mark.parametrize(("before", "after"), few([(2, 4), (4, 2)], (4, 2), together=True))
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    config = small_config()
    whole: Ran = run_on_ranks(run, before, config, tmp_path / "whole")[0]
    half = tmp_path / "whole" / "checkpoints" / "step-00000002"

    resumed: Ran = run_on_ranks(run, after, config, tmp_path / "resumed", resume=half)[0]
    expected = losses(whole.records)
    assert losses(resumed.records) == pytest.approx(
        {step: expected[step] for step in (3, 4)}, rel=1e-5
    )
    for name, weight in resumed.weights.items():
        torch.testing.assert_close(weight, whole.weights[name], rtol=1e-4, atol=1e-5)


@distributed(2)
def test_loading_brings_back_the_weights_that_were_saved(tmp_path: Path) -> None:
    trainer = small_trainer(small_config())
    path = save(trainer, tmp_path)
    saved = full_weights(trainer)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    trainer.resume(path, read_position(path))
    for name, weight in full_weights(trainer).items():
        assert weight.equal(saved[name]), name


@distributed(2)
def test_a_checkpoint_says_how_far_it_was_and_of_what_run(tmp_path: Path) -> None:
    config = small_config()
    run(config, tmp_path)
    path = resolve(tmp_path)
    position = read_position(path)
    assert path.name == "step-00000004"
    assert position.step == 4
    assert position.world_size == 2
    assert Config.from_table(position.config) == config
    assert position_of(path)["fingerprint"] == position.fingerprint


@distributed(2)
@pytest.mark.parametrize("name", ["__0_*.distcp", "__1_*.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_refused_on_every_rank(tmp_path: Path, name: str) -> None:
    trainer = small_trainer(small_config())
    path = save(trainer, tmp_path)
    if trainer.world.is_main:
        damage(next(path.glob(name)))
    torch.distributed.barrier()
    with pytest.raises(TrainError, match="is damaged"):
        load_checkpoint(path, trainer.world, trainer.model, trainer.optimizer)


@distributed(2)
def test_a_checkpoint_of_another_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = save(small_trainer(small_config()), tmp_path)
    other = small_trainer(small_config(model={"width": 32}))
    with pytest.raises(TrainError, match="cannot be loaded"):
        load_checkpoint(path, other.world, other.model, other.optimizer)


@distributed(2)
def test_a_failed_write_is_told_on_every_rank_and_keeps_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    trainer = small_trainer(small_config())
    first = save(trainer, tmp_path)
    with pytest.raises(TrainError, match="after step 0 cannot be written"):
        save(trainer, tmp_path)
    assert CheckpointStore(tmp_path).latest() == first
    load_checkpoint(first, trainer.world, trainer.model, trainer.optimizer)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="no checkpoint there"):
        resolve(tmp_path)


def test_a_position_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "position.json").write_text('{"step": 3}')
    with pytest.raises(TrainError, match=r"position\.json cannot be read"):
        read_position(tmp_path)
