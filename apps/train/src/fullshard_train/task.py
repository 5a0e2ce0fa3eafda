"""The protocol of a task for the trainer: data, model, and how to judge it.

Owns the protocol, so that loop, sharding, checkpoints and report work for any task whose loss is a
cross-entropy over classes. Refuses to hold one: see `fullshard_train.text.task`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

__all__ = ["IGNORED", "Batch", "Evaluation", "Measure", "Task"]

IGNORED = -100
"""The target of a prediction that does not count."""


class Measure(enum.Enum):
    """The scores of a task's models."""

    LOSS = "held-out loss"
    """The mean cross-entropy of a prediction, in the task's unit; less is better."""

    ACCURACY = "held-out accuracy"
    """The part of predictions whose likeliest class is right; more is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows for the model: `inputs`, `[rows, ...]`, and the class of each prediction, `targets`.

    `targets` is int64, `[rows, ...]`; a model's logits have one more dim, the classes.
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same rows on `device`."""
        return Batch(
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Of all held-out predictions: the mean loss, and the part whose likeliest class is right."""

    loss: float
    accuracy: float


class Task(Protocol):
    """Something to learn; each answer is a function of its arguments, the same on all ranks."""

    @property
    def unit(self) -> str:
        """The unit of the loss, for example "nats per byte"."""
        ...

    @property
    def item(self) -> str:
        """The unit of predictions, in the plural, for example "bytes"."""
        ...

    @property
    def measure(self) -> Measure:
        """The score of a trained model."""
        ...

    @property
    def data_is(self) -> str:
        """The training data, in one line."""
        ...

    @property
    def fingerprint(self) -> str:
        """A text that changes when the data does."""
        ...

    @property
    def baselines_are(self) -> str:
        """How the baselines were computed, in one line."""
        ...

    @property
    def held_out_rows(self) -> int:
        """The number of rows that a held-out evaluation reads."""
        ...

    def build_model(self) -> nn.Module:
        """The model; built under the meta device, it costs no memory."""
        ...

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """The parts of the model to shard each on its own, in forward order."""
        ...

    def fill(self, model: nn.Module, seed: int) -> None:
        """Set the initial values of a model with memory, sharded or not.

        Parameters are the same for every world size and the unsharded model.
        """
        ...

    def counted(self, step: int) -> int:
        """How many predictions of update `step` count, of all ranks and micro-batches."""
        ...

    def training_rows(self, step: int, rows: range) -> Batch:
        """Return these rows of the global batch of update `step` (from 0), on the CPU."""
        ...

    def evaluation_rows(self, rows: range) -> Batch:
        """Return these rows of the held-out set, on the CPU."""
        ...

    def baselines(self) -> Mapping[str, float]:
        """The simpler methods for comparison, by name: its `measure`, found by simpler means."""
        ...

    def sample(self, model: nn.Module, device: torch.device) -> str:
        """A look at what the model does, as text. Runs the model, so every rank must call it."""
        ...
