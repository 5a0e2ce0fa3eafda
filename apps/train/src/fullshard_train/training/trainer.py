"""The training loop: updates, evaluations and checkpoints, for any task.

Owns the order of things within a run. The records, in `fullshard_train.reporting.metrics`: for each
update a line of kind "train" with `step` (finished updates), `loss` (mean over the global batch, in
the task's unit), `learning_rate`, `gradient_norm` (before clipping), `items_per_second` (of all
ranks), `peak_memory_mib` (the largest of all ranks), `model_flops_utilisation` (from 0 to 1; where
it is known), and `seconds` (since the run or its resumption began); for each evaluation one of kind
"held_out" with `step`, `loss` and `accuracy`; for each checkpoint one of kind "checkpoint" with
`step` and `pause_seconds`, for which training stood still; for each comparison of ranks one of kind
"ranks" (see `fullshard_train.training.slow_ranks`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fullshard.comm import file_access, waiting
from fullshard.elastic import ReplicaGroups
from fullshard.sharding import FSDPModule
from fullshard_train.checkpoints.checkpoint import Position, capture, load_checkpoint
from fullshard_train.checkpoints.saving import Saver
from fullshard_train.checkpoints.store import CheckpointStore
from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import (
    Share,
    World,
    highest_over_ranks,
    on_main,
    sum_over_ranks,
)
from fullshard_train.ranks.stopping import StopRequest
from fullshard_train.reporting.metrics import MetricsSink
from fullshard_train.reporting.progress import Progress
from fullshard_train.seeds import derive_seed
from fullshard_train.settings.config import Config
from fullshard_train.task import IGNORED, Evaluation, Task
from fullshard_train.training.measures import Measures, Memory, utilisation_of
from fullshard_train.training.optim import build_optimizer
from fullshard_train.training.schedule import learning_rate
from fullshard_train.training.sharded import announce, build_sharded_model, wire_policy
from fullshard_train.training.slow_ranks import watch_ranks

__all__ = ["Outputs", "Trainer", "Update", "cross_entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where a run's results go."""

    store: CheckpointStore
    metrics: MetricsSink
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The measurements of one update, on the device until they are logged."""

    step: int
    loss: torch.Tensor
    gradient_norm: torch.Tensor
    learning_rate: float


class Trainer:
    """A model in training: `step` updates are done, each inside of all that `around_update` makes.

    Functions in `at_end` are called when `fit` ends, also with a `TrainError`: on all ranks alike.

    Args:
        config: what to do.
        world: the ranks; all ranks make a trainer and call its methods in one order.
        mesh: what the model is sharded over.
        device: where this rank computes.
        task: what is learned.
        groups: the replica groups of an elastic run; see `ElasticTrainer`.

    Attributes:
        feedback_nbytes: what error feedback takes on this rank; 0 without it.
    """

    def __init__(
        self,
        config: Config,
        *,
        world: World,
        mesh: DeviceMesh,
        device: torch.device,
        task: Task,
        groups: ReplicaGroups | None = None,
    ) -> None:
        self.config = config
        self.world = world
        self.device = device
        self.task = task
        self.step = 0
        self.around_update: list[Callable[[], AbstractContextManager[object]]] = []
        self.at_end: list[Callable[[], object]] = []
        self.model = build_sharded_model(task, config, mesh, device, groups)
        wire, shards = wire_policy(config.parallel), mesh.size(mesh.ndim - 1)
        self.feedback_nbytes = wire.feedback_nbytes(self.model, shards)
        self.optimizer = build_optimizer(self.model.parameters(), config.optim)
        self.measures = Measures(
            memory=Memory(device),
            utilisation=utilisation_of(task, self.model, config, world=world, device=device),
        )
        self._pending: list[Update] = []
        self._started = self._last_flush = time.perf_counter()

    def resume(self, checkpoint: Path, position: Position) -> None:
        """Continue from a checkpoint.

        Raises:
            TrainError: as `load_checkpoint`.
        """
        load_checkpoint(checkpoint, self.world, self.model, self.optimizer)
        self.step = position.step

    def fit(self, outputs: Outputs, request: StopRequest | None = None) -> int:
        """Do the remaining updates and leave a checkpoint after the last one.

        Returns 0; or the number of the signal that made it save and stop before, at the step that
        all ranks had reached.

        Args:
            outputs: where results go.
            request: whether to stop; the ranks' requests may differ.

        Raises:
            TrainError: the loss is no longer finite, or a checkpoint cannot be written.
        """
        try:
            number = self._fit(outputs, StopRequest() if request is None else request)
        except TrainError:
            with suppress(TrainError):  # the first one is what to put right
                self._end()
            raise
        self._end()
        return number

    def _end(self) -> None:
        for call in self.at_end:
            call()

    def _fit(self, outputs: Outputs, stop: StopRequest) -> int:
        background = self.config.checkpoint.background
        with (
            Saver(outputs.store, self.world, background=background) as saver,
            watch_ranks(self.config.run.slow_ranks, self.world, outputs.metrics) as ranks,
        ):
            self._started = self._last_flush = time.perf_counter()
            while True:
                number, failed = highest_over_ranks(stop.number, saver.failed)
                if failed:
                    saver.finish()
                if number:
                    self._save_before_stopping(outputs, saver)
                if number or self.step == self.config.train.steps:
                    return number
                self._advance(outputs, saver)
                ranks.after(self.step)

    def save(self, outputs: Outputs, saver: Saver) -> None:
        """Begin a checkpoint, in the background if the config asks for it."""
        position = Position(
            step=self.step,
            config=self.config.to_table(),
            fingerprint=self.task.fingerprint,
            world_size=self.world.size,
            torch_version=torch.__version__,
        )
        began = time.perf_counter()
        with file_access("checkpoint"):
            saver.start(position, capture(self.model, self.optimizer))
        pause = round(time.perf_counter() - began, 6)
        outputs.metrics.write({"kind": "checkpoint", "step": self.step, "pause_seconds": pause})

    def _advance(self, outputs: Outputs, saver: Saver) -> None:
        """Run one update, and the evaluations and saves that follow it."""
        train, every = self.config.train, self.config.checkpoint.every
        with ExitStack() as around:
            for enter in self.around_update:
                around.enter_context(enter())
            self._pending.append(self._update())
        self.step += 1
        last = self.step == train.steps
        evaluate = last or self.step % train.evaluate_every == 0
        save = last or self.step % every == 0
        if evaluate or save or self.step % train.log_every == 0:
            self._flush(outputs)
        if evaluate:
            found = self.evaluate()
            outputs.metrics.write(
                {
                    "kind": "held_out",
                    "step": self.step,
                    "loss": found.loss,
                    "accuracy": found.accuracy,
                }
            )
        if save:
            self.save(outputs, saver)
        if evaluate or save:
            self._last_flush = time.perf_counter()

    def _save_before_stopping(self, outputs: Outputs, saver: Saver) -> None:
        if self.step == 0:
            return  # nothing to lose, and an optimizer that never stepped has no state to save
        if self._pending:
            self._flush(outputs)
        saver.finish()
        # There is one already if this step was due for it, or if no step was done.
        if not on_main(lambda: outputs.store.path(self.step).exists()):
            self.save(outputs, saver)

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """How the model does on the task's held-out rows; the same numbers on every rank."""
        rows, each = self.task.held_out_rows, max(self._rows_per_forward(), 1)
        total = torch.zeros(3, dtype=torch.float64)
        self.model.eval()
        for start in range(0, rows, each * self.world.size):
            first = start + each * self.world.rank
            wanted = range(min(first, rows), min(first + each, rows))
            # Every rank runs the same number of forwards; one without rows left runs one that does
            # not count.
            batch = self.task.evaluation_rows(wanted or range(1)).to(self.device)
            if not wanted:
                batch = replace(batch, targets=torch.full_like(batch.targets, IGNORED))
            logits = self.model(batch.inputs)
            loss = cross_entropy(logits, batch.targets, reduction="sum")
            right = (logits.argmax(dim=-1) == batch.targets).sum()
            count = (batch.targets != IGNORED).sum()
            total += torch.stack((loss.double(), right.double(), count.double())).cpu()
        self.model.train()
        loss_sum, right_sum, count_sum = sum_over_ranks(total).tolist()
        return Evaluation(loss=loss_sum / count_sum, accuracy=right_sum / count_sum)

    def _rows_per_forward(self) -> int:
        return self.config.train.batch // (self.world.size * self.config.train.accumulate)

    @property
    def share(self) -> Share:
        """This rank's part of the batch."""
        return self.world.share

    def _seed_step(self) -> None:
        # A task may draw in its forward (dropout); the stream is the step's and the rank's own.
        torch.manual_seed(derive_seed(self.config.train.seed, "step", self.step, self.share.index))

    def _set_rate(self) -> float:
        """Set the learning rate of the step and return it."""
        config = self.config
        rate = learning_rate(config.optim, step=self.step, steps=config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _update(self) -> Update:
        config = self.config
        rate = self._set_rate()
        self._seed_step()
        loss = self._accumulate_gradients()
        with waiting("gradient norm"):
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip_norm)
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Update(step=self.step, loss=loss, gradient_norm=norm, learning_rate=rate)

    def _accumulate_gradients(self) -> torch.Tensor:
        """This rank's part of the batch's mean loss, times the ranks; leaves the gradients, 0-d."""
        model, train = self.model, self.config.train
        assert isinstance(model, FSDPModule)
        total = torch.zeros((), device=self.device)
        # Predictions of the whole batch have equal weight on any rank; the reduction averages
        # over ranks.
        counted = self.task.counted(self.step)
        for micro in range(train.accumulate):
            rows = self.share.rows(train.batch, micro=micro, accumulate=train.accumulate)
            batch = self.task.training_rows(self.step, rows).to(self.device)
            announce(model, self.config, last=micro == train.accumulate - 1)
            logits = model(batch.inputs)
            loss = cross_entropy(logits, batch.targets, reduction="sum")
            loss = loss * self.world.size / counted
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def _flush(self, outputs: Outputs) -> None:
        """Record the updates since the last flush: one all-reduce, one wait for the device."""
        pending, self._pending = self._pending, []
        losses = sum_over_ranks(torch.stack([update.loss for update in pending])) / self.world.size
        now = time.perf_counter()
        items = sum(self.task.counted(update.step) for update in pending)
        speed = items / (now - self._last_flush)
        self._last_flush = now
        columns = self.measures.columns(speed)
        for update, loss in zip(pending, losses.tolist(), strict=True):
            outputs.metrics.write(
                {
                    "kind": "train",
                    "step": update.step + 1,
                    "loss": loss,
                    "learning_rate": update.learning_rate,
                    "gradient_norm": float(update.gradient_norm),
                    **columns,
                    "seconds": round(now - self._started, 3),
                }
            )
            if not math.isfinite(loss):
                checkpoint = outputs.store.latest()
                again = "start again" if checkpoint is None else f"resume from {checkpoint}"
                raise TrainError(
                    f"the loss of step {update.step + 1} is {loss}; {again} with a lower"
                    " optim.learning_rate or optim.clip_norm"
                )
        outputs.progress.advance(len(pending), loss=losses[-1].item(), speed=speed)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, *, reduction: str) -> torch.Tensor:
    """The loss of logits, `[..., classes]`, in float32, 0-d: over all targets but `IGNORED`."""
    return functional.cross_entropy(
        logits.flatten(0, -2).float(),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction=reduction,
    )
