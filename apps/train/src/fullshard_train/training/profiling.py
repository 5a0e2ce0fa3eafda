"""`train.profile_steps`: chosen steps as torch.profiler saw them, for Perfetto.

Owns which steps, and one trace per rank: `profile/rank-<number>.json.gz` in the run's folder. A run
that a signal or an error stops before the last of them writes what there is; a run that is resumed
during these steps writes the rest to `rank-<number>-from-<step>.json.gz`. The engine's named ranges
are in it (gathers, reductions, pre-forward to post-backward, per module).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import raise_together
from fullshard_train.training.trainer import Trainer

__all__ = ["Profiled"]


class Profiled:
    """Records the steps that a config names, each rank its own.

    Args:
        trainer: of this rank; its config sets the steps, and the last of them ends the recording.
        folder: where the traces go.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer = trainer
        self._steps = trainer.config.train.profiled
        self._folder = folder
        activities = [ProfilerActivity.CPU]
        if trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._began = 0  # the step; 0: nothing is recorded

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inside the ``with`` block is one update.

        Raises:
            TrainError: on every rank, if a trace cannot be written.
        """
        number = self._trainer.step + 1
        if number not in self._steps:
            yield
            return
        if not self._began:
            # A run may be resumed in the middle of the steps.
            with warnings.catch_warnings():
                # torch 2.11 warns at every first profile that earlier profiles are missing.
                warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
                self._profile.start()
            self._began = number
        with record_function(f"step {number}"):
            yield
        if number == self._steps[-1]:
            self.end()

    def end(self) -> None:
        """Write what is recorded and not written; every rank calls this after the same step.

        Raises:
            TrainError: on every rank, if a trace cannot be written.
        """
        if self._began:
            self._profile.stop()
            raise_together(self._write)
            self._began = 0

    def _write(self) -> None:
        name = f"rank-{self._trainer.world.rank}"
        resumed = "" if self._began == self._steps[0] else f"-from-{self._began}"
        path = self._folder / f"{name}{resumed}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".new-{path.name}")
            self._profile.export_chrome_trace(str(temporary))
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            raise TrainError(f"profile {path}: cannot be written: {error}") from error
