"""`train.profile_steps`: chosen steps as torch.profiler saw them, for Perfetto.

Owns which steps, and one trace per rank: `profile/rank-<number>.json.gz` in the run's folder. The
engine's named ranges are in it (gathers, reductions, pre-forward to post-backward, per module).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import together
from fullshard_train.training.trainer import Trainer

__all__ = ["Profiled"]


class Profiled:
    """Records the steps that a config names, each rank its own.

    Args:
        trainer: of this rank; its config says which steps, and the last of them ends the recording.
        folder: where the traces go.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer = trainer
        self._steps = trainer.config.train.profiled
        self._path = folder / f"rank-{trainer.world.rank}.json.gz"
        activities = [ProfilerActivity.CPU]
        if trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._recording = False

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
        if not self._recording:
            # A run may be resumed in the middle of the steps.
            self._profile.start()
            self._recording = True
        with record_function(f"step {number}"):
            yield
        if number == self._steps[-1]:
            self._recording = False
            self._profile.stop()
            together(self._write)

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f".new-{self._path.name}")
            self._profile.export_chrome_trace(str(temporary))
            temporary.replace(self._path)
        except (OSError, RuntimeError) as error:
            raise TrainError(f"profile {self._path}: cannot be written: {error}") from error
