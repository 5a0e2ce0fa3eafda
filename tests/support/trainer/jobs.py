"""Small training jobs for the tests of the trainer: a config, a corpus, and a run inside a rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fullshard_train.checkpoints.checkpoint import read_position
from fullshard_train.checkpoints.saving import Saver
from fullshard_train.checkpoints.store import CheckpointStore
from fullshard_train.digits.task import DigitsTask, read_digits
from fullshard_train.hf.task import load_task
from fullshard_train.ranks.distributed import World, make_mesh
from fullshard_train.ranks.stopping import StopRequest
from fullshard_train.reporting.metrics import JsonLines, NoMetrics, read_metrics
from fullshard_train.reporting.progress import Progress
from fullshard_train.settings.config import Config, default_table, merge
from fullshard_train.task import IGNORED, Batch, Task
from fullshard_train.text.corpus import split
from fullshard_train.text.task import TextTask
from fullshard_train.training.optim import build_optimizer
from fullshard_train.training.schedule import learning_rate
from fullshard_train.training.trainer import Outputs, Trainer
from support.ranks import run_on_ranks

SMALL: Mapping[str, Mapping[str, Any]] = {
    "data": {"block_bytes": 512, "held_out_every": 8},
    "model": {"layers": 2, "width": 16, "heads": 2, "context": 16, "expansion": 2},
    "train": {
        "steps": 4,
        "batch": 8,
        "accumulate": 2,
        "evaluate_every": 2,
        "held_out_rows": 13,
    },
    "optim": {"warmup_steps": 2},
    "parallel": {"device": "cpu"},
    "checkpoint": {"every": 2},
    "sample": {"length": 4},
}

# Sums over a batch come in another order on more ranks: a few units in the last place of float32.
# AdamW's division by the root of the second moment amplifies them without bound where gradients are
# tiny, unless its epsilon bounds it.
TOLERANCE: Any = {"rtol": 1e-4, "atol": 1e-5}
EPSILON = 1e-3

TEXT = b"".join(b"%d times %d is %d.\n" % (a, b, a * b) for a in range(30) for b in range(30))


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a small run did, as one rank saw it; `records` are rank 0's metrics without timings."""

    records: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]


def settings(**sections: Mapping[str, Any]) -> list[str]:
    """The small config, with these settings changed, as words of the command line."""
    return [
        word
        for section, values in merge(SMALL, sections).items()
        for name, value in values.items()
        for word in ("--set", f"{section}.{name}={json.dumps(value)}")
    ]


def small_config(**sections: Mapping[str, Any]) -> Config:
    """The small config with these settings changed, by section."""
    return Config.from_table(merge(default_table(), SMALL, sections))


def small_task(config: Config) -> Task:
    """The task that the config names: digits, a model of transformers, or learning `TEXT`."""
    if config.run.task == "hf":
        return load_task(config, this_world())
    if config.run.task == "digits":
        return DigitsTask(config, torch.frombuffer(bytearray(read_digits()), dtype=torch.uint8))
    return small_text_task(config)


def small_text_task(config: Config) -> TextTask:
    """The task of learning `TEXT`."""
    data = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)
    return TextTask(config, split(data, config.data))


def plain_model(task: Task, config: Config) -> nn.Module:
    """The unsharded model of a task, with its initial weights."""
    model = task.build_model()
    task.fill(model, config.train.seed)
    return model


def plain_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean over all predictions of a batch that count."""
    logits = model(batch.inputs).flatten(0, -2)
    return functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED)


def plain_training(
    task: Task,
    config: Config,
    model: nn.Module,
    loss_of: Callable[[nn.Module, Batch], torch.Tensor] = plain_loss,
) -> dict[int, float]:
    """Train a model in plain torch, each batch as a whole, and return the losses by step.

    The definition of what the trainer does.
    """
    optimizer = build_optimizer(model.parameters(), config.optim)
    found: dict[int, float] = {}
    for step in range(config.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step=step, steps=config.train.steps)
        loss = loss_of(model, task.training_rows(step, range(config.train.batch)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        found[step + 1] = loss.item()
    return found


def assert_trained_as(ran: Ran, expected: dict[int, float], model: nn.Module) -> None:
    """A run has these losses, and in the end the weights of this unsharded model."""
    assert losses(ran.records) == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ran.weights[name], parameter.detach(), **TOLERANCE)


def this_world() -> World:
    """The world of the process group that is running."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank=rank, size=size, local_rank=rank, local_size=size)


def small_trainer(config: Config) -> Trainer:
    """A trainer on the process group that is running; call it on every rank."""
    world, device = this_world(), torch.device("cpu")
    mesh = make_mesh(config, world, device)
    return Trainer(config, world=world, mesh=mesh, device=device, task=small_task(config))


def assert_trains_as_unsharded(config: Config, world_size: int, folder: Path) -> None:
    """Ranks train as one process that computes each batch as a whole, with one model."""
    task = small_task(config)
    model = plain_model(task, config)
    expected = plain_training(task, config, model)
    assert_trained_as(run_on_ranks(run, world_size, config, folder)[0], expected, model)


def run(config: Config, folder: Path, *, resume: Path | None = None) -> Ran:
    """Trains into `folder`, from a checkpoint if one is given; call it on every rank."""
    trainer = small_trainer(config)
    if resume is not None:
        trainer.resume(resume, read_position(resume))
    fit(trainer, folder)
    return Ran(records=untimed(folder / "metrics.jsonl"), weights=full_weights(trainer))


def fit(trainer: Trainer, folder: Path, request: StopRequest | None = None) -> int:
    """Lets a trainer train into `folder`; what `Trainer.fit` returns."""
    main = trainer.world.is_main
    if main:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    outputs = small_outputs(trainer, folder)
    number = trainer.fit(outputs, request)
    outputs.metrics.close()
    dist.barrier()
    return number


def small_outputs(trainer: Trainer, folder: Path) -> Outputs:
    """Where `fit` writes."""
    main, config = trainer.world.is_main, trainer.config
    return Outputs(
        store=CheckpointStore(folder / "checkpoints", keep=config.checkpoint.keep),
        metrics=JsonLines(folder / "metrics.jsonl") if main else NoMetrics(),
        progress=Progress(total=config.train.steps, done=0, item="bytes", shown=False),
    )


def save(trainer: Trainer, root: Path) -> Path:
    """Writes a checkpoint into the store at `root`, and returns where it is."""
    store = CheckpointStore(root)
    progress = Progress(total=trainer.config.train.steps, done=0, item="bytes", shown=False)
    outputs = Outputs(store=store, metrics=NoMetrics(), progress=progress)
    with Saver(store, trainer.world, background=False) as saver:
        trainer.save(outputs, saver)
    return store.path(trainer.step)


def untimed(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file without what a clock, or a look at memory, wrote."""
    timed = ("seconds", "items_per_second", "pause_seconds", "peak_memory_mib")
    return [
        {name: value for name, value in record.items() if name not in timed}
        for record in read_metrics(path)
    ]


def losses(records: list[dict[str, Any]], kind: str = "train") -> dict[int, float]:
    """The losses of one kind by step."""
    return {record["step"]: record["loss"] for record in records if record["kind"] == kind}


def full_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The whole parameters, by name."""
    whole: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        whole[name] = parameter.full_tensor().detach().clone()
    return whole


def damage(path: Path) -> None:
    """Changes one byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def position_of(checkpoint: Path) -> dict[str, Any]:
    """The JSON file of a checkpoint."""
    table: dict[str, Any] = json.loads((checkpoint / "position.json").read_text(encoding="utf-8"))
    return table
