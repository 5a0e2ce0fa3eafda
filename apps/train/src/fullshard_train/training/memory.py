"""Checkpoints of a run in the memory of its hosts, in addition to files.

Owns when they are made (`checkpoint.memory`), and which run they belong to: the name is made of the
run's folder, its data and its settings, so a restart finds only what it may continue.
`fullshard.checkpoint.MemoryCheckpoints` owns the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fullshard.checkpoint import MemoryCheckpointError, MemoryCheckpoints
from fullshard_train.checkpoints.checkpoint import capture, put
from fullshard_train.errors import TrainError
from fullshard_train.training.trainer import Trainer

__all__ = ["HostMemory"]

_ALIKE = ("model", "digits", "hf", "data", "optim")
"""Sections that give the state its names and shapes, or its meaning."""


class HostMemory:
    """Saves every `checkpoint.memory` updates; every rank makes one.

    Hosts are the machines, or the agents of torchrun on them.

    Args:
        trainer: which saves at the beginning of the next update.
        folder: of the run.
        root: in which file system; None: shared memory.

    Raises:
        TrainError: on every rank, if the memory of a host cannot be used.
    """

    def __init__(self, trainer: Trainer, folder: Path, root: Path | None = None) -> None:
        self._trainer = trainer
        table = trainer.config.to_table()
        told = [str(folder.resolve()), trainer.task.fingerprint, [table[each] for each in _ALIKE]]
        digest = hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()
        host = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '0')}"
        try:
            self.checkpoints = MemoryCheckpoints(f"train-{digest[:16]}", host=host, folder=root)
        except MemoryCheckpointError as error:
            raise TrainError(f"checkpoint.memory: {error}") from error
        trainer.around_update.append(self._around)
        trainer.at_end.append(self._end)

    def restore(self) -> int | None:
        """Continue from the newest step that is whole, and return it; None if there is none.

        Raises:
            TrainError: on every rank, if it cannot be loaded.
        """
        optimizer = self._trainer.optimizer
        has_stepped, state = bool(optimizer.state), self._state()
        try:
            step = self.checkpoints.restore(state)
        except MemoryCheckpointError as error:
            raise TrainError(f"checkpoint.memory: {error}") from error
        if step is not None:
            put(self._trainer.model, self._trainer.optimizer, state)
            self._trainer.step = step
        elif not has_stepped:
            optimizer.state.clear()  # torch made it by a step, which would count
        return step

    def _state(self) -> dict[str, Any]:
        return capture(self._trainer.model, self._trainer.optimizer)

    @contextmanager
    def _around(self) -> Iterator[None]:
        """Save what the update before has left."""
        step = self._trainer.step
        if step and step % self._trainer.config.checkpoint.memory == 0:
            try:
                self.checkpoints.save(step, self._state())
            except MemoryCheckpointError as error:
                raise TrainError(f"checkpoint.memory: {error}") from error
        yield

    def _end(self) -> None:
        """Remove the memory at the end of the run; leave the memory after an interruption."""
        if self._trainer.step == self._trainer.config.train.steps:
            self.checkpoints.purge()
        else:
            self.checkpoints.close()
