"""Every prediction of a batch weighs the same, on whichever rank and in whichever micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from fullshard_train.ranks.distributed import make_mesh
from fullshard_train.settings.config import Config
from fullshard_train.task import IGNORED, Batch
from fullshard_train.text.corpus import split
from fullshard_train.text.task import TextTask
from fullshard_train.training.trainer import Trainer
from support.products import few
from support.ranks import run_on_ranks
from support.trainer.jobs import (
    EPSILON,
    TEXT,
    Ran,
    assert_trained_as,
    fit,
    full_weights,
    plain_loss,
    plain_model,
    plain_training,
    small_config,
    this_world,
    untimed,
)

CONFIG = small_config(optim={"epsilon": EPSILON})


class Lopsided(TextTask):
    """A row of a batch counts 1, 2, 4, 8 or 16 of its 16 predictions."""

    def training_rows(self, step: int, rows: range) -> Batch:
        batch = super().training_rows(step, rows)
        kept = torch.tensor([self._kept(step, row) for row in rows])
        beyond = torch.arange(batch.targets.shape[1]) >= kept[:, None]
        return Batch(inputs=batch.inputs, targets=batch.targets.masked_fill(beyond, IGNORED))

    def counted(self, step: int) -> int:
        return sum(self._kept(step, row) for row in range(self.config.train.batch))

    @staticmethod
    def _kept(step: int, row: int) -> int:
        return int(2 ** ((step + row) % 5))


def _task(config: Config) -> Lopsided:
    data = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    return Lopsided(config, split(data, config.data))


def _run(folder: Path) -> Ran:
    world, device = this_world(), torch.device("cpu")
    mesh = make_mesh(CONFIG, world, device)
    trainer = Trainer(CONFIG, world=world, mesh=mesh, device=device, task=_task(CONFIG))
    fit(trainer, folder)
    return Ran(records=untimed(folder / "metrics.jsonl"), weights=full_weights(trainer))


@pytest.mark.parametrize("world_size", few([2, 1, 4], 2, 1))
def test_training_on_rows_that_count_differently_equals_that_of_the_unsharded_model(
    tmp_path: Path, world_size: int
) -> None:
    task, means = _task(CONFIG), []

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            logits = model(batch.inputs).transpose(1, 2)
        each = functional.cross_entropy(logits, batch.targets, reduction="none")
        counted = (batch.targets != IGNORED).sum(dim=1)
        means.append((each.sum(dim=1) / counted).mean().item())
        return plain_loss(model, batch)

    model = plain_model(task, CONFIG)
    expected = plain_training(task, CONFIG, model, loss_of)
    ran: list[Ran] = run_on_ranks(_run, world_size, tmp_path)
    assert_trained_as(ran[0], expected, model)
    # so a mean of means would be seen
    assert means != pytest.approx([*expected.values()], rel=1e-4)
