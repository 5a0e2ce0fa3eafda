"""Checkpoints written during training.

Owns the one checkpoint that may be in flight. Training stops only while this rank's shards are
copied (staged); a thread then writes the copy, and commits it once every rank has written its own.
The thread has a separate process group, so its collectives and those of training never mix.
Refuses to know what is in a checkpoint or how it appears: see
`fullshard_train.checkpoints.checkpoint` and `fullshard_train.checkpoints.store`.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fullshard.checkpoint import async_save
from fullshard_train.checkpoints.checkpoint import Position, begin_checkpoint, commit_checkpoint
from fullshard_train.checkpoints.store import CheckpointStore
from fullshard_train.ranks.distributed import World

__all__ = ["Saver"]


class Saver:
    """Writes checkpoints, one at a time; every rank makes one and calls the same methods.

    As a context manager, it waits at the end for the one in flight.

    Args:
        store: where.
        world: the ranks.
        background: whether `start` returns before the checkpoint is written.
    """

    def __init__(self, store: CheckpointStore, world: World, *, background: bool) -> None:
        self.store = store
        self.world = world
        self.background = background
        self._group = dist.new_group(backend="gloo", timeout=world.patience)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._flight: Future[Path] | None = None

    @property
    def failed(self) -> bool:
        """Whether the checkpoint in flight has failed on this rank; `finish` tells why."""
        flight = self._flight
        return flight is not None and flight.done() and flight.exception() is not None

    def start(self, position: Position, state: dict[str, Any]) -> None:
        """Begin a checkpoint of what `capture` gave; its tensors may change afterwards.

        Waits first for the one before, if that is still in flight.

        Raises:
            TrainError: on every rank, when that one failed, or this one cannot begin.
        """
        self.finish()
        folder = begin_checkpoint(self.store, position.step)
        written = async_save(state, folder, group=self._group)
        self._flight = self._thread.submit(
            commit_checkpoint,
            self.store,
            self.world,
            position,
            written.result,
            group=self._group,
        )
        if not self.background:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint in flight, if there is one.

        Raises:
            TrainError: on every rank, when it cannot be written; earlier ones are untouched.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            # After an error, too, what is in flight is written to its end: it does not depend on
            # the main threads.
            self._thread.shutdown()
            dist.destroy_process_group(self._group)
