"""The trainer against its definition: the unsharded model in plain torch, on whole batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import make_mesh
from fullshard_train.settings.config import Config
from fullshard_train.training.schedule import learning_rate
from fullshard_train.training.sharded import shard_model
from fullshard_train.training.verifying import require_verified
from support.products import few
from support.ranks import distributed, run_on_ranks
from support.trainer.jobs import (
    EPSILON,
    Ran,
    assert_trains_as_unsharded,
    fit,
    full_weights,
    losses,
    plain_loss,
    plain_model,
    plain_training,
    run,
    small_config,
    small_task,
    small_trainer,
    this_world,
)


def _plain_training(config: Config) -> tuple[dict[int, float], torch.nn.Module]:
    """The losses by step, and the model, of one process that computes each batch as a whole."""
    task = small_task(config)
    model = plain_model(task, config)
    return plain_training(task, config, model), model


@pytest.mark.parametrize("optimizer", few(["muon", "soap", "adamw8bit"], "muon"))
@pytest.mark.parametrize("world_size", [2])
def test_other_optimizers_train_as_on_the_unsharded_model(
    tmp_path: Path, world_size: int, optimizer: str
) -> None:
    """Momentum is rounded to bf16 and averages to 8 bits: a rounding may turn, and moves 1 %."""
    config = small_config(optim={"epsilon": EPSILON, "optimizer": optimizer})
    expected, _ = _plain_training(config)
    ran: list[Ran] = run_on_ranks(run, world_size, config, tmp_path)
    found = losses(ran[0].records)
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-3), step
    usual, _ = _plain_training(small_config(optim={"epsilon": EPSILON}))
    assert optimizer == "adamw8bit" or found != pytest.approx(usual, rel=1e-3)


def test_replicas_of_shards_train_as_the_unsharded_model(tmp_path: Path) -> None:
    config = small_config(optim={"epsilon": EPSILON}, parallel={"mesh": "2x2"})
    assert_trains_as_unsharded(config, 4, tmp_path)
    assert run_on_ranks(_shape_of_mesh, 4, config) == [(2, 2)] * 4


def _shape_of_mesh(config: Config) -> tuple[int, ...]:
    return tuple(make_mesh(config, this_world(), torch.device("cpu")).shape)


def _initial(config: Config) -> dict[str, torch.Tensor]:
    return full_weights(small_trainer(config))


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_initial_weights_are_those_of_the_unsharded_model(world_size: int) -> None:
    config = small_config()
    expected = dict(plain_model(small_task(config), config).named_parameters())
    for weights in run_on_ranks(_initial, world_size, config):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert weight.equal(expected[name]), name


@pytest.mark.cross
@pytest.mark.parametrize("world_size", few([2, 4], 2))
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_equals_training_the_unsharded_model_on_whole_batches(
    tmp_path: Path, world_size: int, recompute: bool, accumulate: int
) -> None:
    train = {"activation_checkpointing": recompute, "accumulate": accumulate}
    config = small_config(train=train, optim={"epsilon": EPSILON})
    assert_trains_as_unsharded(config, world_size, tmp_path)


@pytest.mark.parametrize("zero", [1, 2])
def test_all_zero_stages_train_the_same_model(tmp_path: Path, zero: int) -> None:
    config = small_config(
        train={"accumulate": 2}, parallel={"zero": zero}, optim={"epsilon": EPSILON}
    )
    assert_trains_as_unsharded(config, 2, tmp_path)


@pytest.mark.parametrize(
    "parallel",
    few(
        [
            {"param_dtype": "bfloat16"},
            {"wire_dtype": "bfloat16"},
            {"wire_dtype": "int8"},
            {"wire_dtype": "int8 both ways"},
            {"wire_dtype": "int8 both ways with error feedback"},
        ],
        {"param_dtype": "bfloat16"},
        {"wire_dtype": "int8 both ways with error feedback"},
    ),
)
def test_a_step_of_mixed_precision_is_near_the_one_in_full_precision(
    tmp_path: Path, parallel: dict[str, str]
) -> None:
    config = small_config(parallel=parallel)
    expected, _ = _plain_training(config)
    found = losses(run_on_ranks(run, 2, config, tmp_path)[0].records)
    for step, loss in expected.items():
        # bfloat16 keeps 8 bits: a loss near 5.5 of values rounded to 2**-9 of their size.
        assert found[step] == pytest.approx(loss, rel=2**-8), step
    assert found != expected


@distributed(2, 4)
def test_an_evaluation_counts_every_held_out_row_once() -> None:
    # 13 rows are no multiple of the ranks: some rank runs a forward that does not count.
    trainer = small_trainer(small_config())
    task = trainer.task
    model = plain_model(task, trainer.config)
    batch = task.evaluation_rows(range(task.held_out_rows))
    assert task.held_out_rows == 13
    with torch.no_grad():
        logits, expected = model(batch.inputs), plain_loss(model, batch)
        right = (logits.argmax(dim=-1) == batch.targets).double().mean()
    found = trainer.evaluate()
    assert math.isclose(found.loss, expected.item(), rel_tol=1e-6)
    assert found.accuracy == right.item()


@distributed(2)
def test_every_rank_generates_the_same_sample() -> None:
    trainer = small_trainer(small_config())
    sample = trainer.task.sample(trainer.model, trainer.device)
    samples: list[Any] = [None, None]
    torch.distributed.all_gather_object(samples, sample)
    assert samples[0] == samples[1]
    assert sample.startswith("def ")


@distributed(2)
def test_a_loss_that_is_not_finite_ends_the_run_on_every_rank(tmp_path: Path) -> None:
    trainer = small_trainer(small_config())
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(math.nan)
    with pytest.raises(TrainError, match="the loss of step 1 is nan; start again with a low"):
        fit(trainer, tmp_path)
    assert not (tmp_path / "checkpoints").exists()


@distributed(2)
def test_metrics_name_step_loss_rate_and_norm_for_every_update(tmp_path: Path) -> None:
    config = small_config(train={"log_every": 3})
    records = run(config, tmp_path).records
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == [1, 2, 3, 4]
    for record in train:
        rate = learning_rate(config.optim, step=record["step"] - 1, steps=4)
        assert record["learning_rate"] == rate
        assert record["gradient_norm"] > 0
    assert list(losses(records, "held_out")) == [2, 4]


@distributed(2)
def test_verify_finds_the_trainers_own_model_equal_and_a_wrong_divisor_not() -> None:
    config, device = small_config(), torch.device("cpu")
    world = this_world()
    task, mesh = small_task(config), make_mesh(config, world, device)
    assert require_verified(task, config, world=world, mesh=mesh, device=device).equal

    def wrongly(model: Any, *arguments: Any) -> None:
        shard_model(model, *arguments).set_gradient_divide_factor(1.0)

    with (
        mock.patch("fullshard_train.training.verifying.shard_model", wrongly),
        pytest.raises(TrainError, match=r"--verify: not equal: gradient of step 0: .*2 times"),
    ):
        require_verified(task, config, world=world, mesh=mesh, device=device)
