"""Every prediction of a batch weighs the same, on whichever rank and in whichever micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from fullshard_train.ranks.distributed import make_mesh
from fullshard_train.settings.config import Config
from fullshard_train.task import IGNORED, Batch
from fullshard_train.text.corpus import split
from fullshard_train.text.task import TextTask
from fullshard_train.training.optim import build_optimizer
from fullshard_train.training.schedule import learning_rate
from fullshard_train.training.trainer import Trainer
from support.products import few
from support.ranks import run_on_ranks
from train.jobs import TEXT, Ran, fit, full_weights, losses, small_config, this_world, untimed

CONFIG = small_config(optim={"epsilon": 1e-3})


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
    task = _task(CONFIG)
    model = task.build_model()
    task.fill(model, CONFIG.train.seed)
    optimizer = build_optimizer(model.parameters(), CONFIG.optim)
    expected: dict[int, float] = {}
    means: dict[int, float] = {}
    for step in range(CONFIG.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(CONFIG.optim, step=step, steps=CONFIG.train.steps)
        batch = task.training_rows(step, range(CONFIG.train.batch))
        logits = model(batch.inputs)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        expected[step + 1] = loss.item()
        each = functional.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
        counted = (batch.targets != IGNORED).sum(dim=1)
        means[step + 1] = (each.sum(dim=1) / counted).mean().item()
    ran: list[Ran] = run_on_ranks(_run, world_size, tmp_path)
    assert losses(ran[0].records) == pytest.approx(expected, rel=1e-5)
    assert means != pytest.approx(expected, rel=1e-4)  # so a mean of means would be seen
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ran[0].weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)
