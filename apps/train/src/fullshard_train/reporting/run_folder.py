"""The folder of a run: the paths of its files, and the refusal to write over another run."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path

from fullshard_train.errors import TrainError
from fullshard_train.settings.config import Config, to_toml

__all__ = ["RunFolder", "fresh_path", "newest_run"]

_RUNS = Path("runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The paths of a run's files; rank 0 writes them."""

    root: Path

    @property
    def config(self) -> Path:
        """The complete config, as TOML."""
        return self.root / "config.toml"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The measurements, as JSON lines."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """The folder of TensorBoard's event files, if they are wanted."""
        return self.root / "tensorboard"

    @property
    def weights(self) -> Path:
        """The full weights, unless another file was named."""
        return self.root / "model.safetensors"

    @property
    def model(self) -> Path:
        """The folder that transformers reads, for the task "hf", unless another was named."""
        return self.root / "model"

    @property
    def curve(self) -> Path:
        """The picture of the losses."""
        return self.root / "loss.png"

    @property
    def course(self) -> Path:
        """The picture of learning rate, gradient norm, speed and memory."""
        return self.root / "run.png"

    @property
    def profile(self) -> Path:
        """The folder of traces of single steps, if they are wanted."""
        return self.root / "profile"

    @property
    def sample(self) -> Path:
        """The generated sample."""
        return self.root / "sample.txt"

    @property
    def result(self) -> Path:
        """The final numbers, as JSON."""
        return self.root / "result.json"

    def create(self, config: Config) -> None:
        """Make the folder and write the config into it.

        Raises:
            TrainError: it holds something already, or cannot be made.
        """
        self.require_free()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.describe(config)
        except OSError as error:
            raise TrainError(f"run folder {self.root}: {error.strerror or error}") from error

    def require_free(self) -> None:
        """Pass if there is nothing yet.

        Raises:
            TrainError: it holds something already, or cannot be looked into.
        """
        try:
            taken = self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir()))
        except OSError as error:
            raise TrainError(f"run folder {self.root}: {error.strerror or error}") from error
        if taken:
            raise TrainError(
                f"run folder {self.root}: holds something already, and nothing is overwritten;"
                f" give another --out, or continue it with --resume {self.root}"
            )

    def describe(self, config: Config) -> None:
        """Write the config into the folder; resuming may have changed it."""
        temporary = self.config.with_name(self.config.name + ".new")
        temporary.write_text(to_toml(config), encoding="utf-8")
        temporary.replace(self.config)

    def holds_a_beginning(self) -> bool:
        """Whether a run of ours began here."""
        return self.config.exists() or self.config.with_name(self.config.name + ".new").exists()


def fresh_path() -> Path:
    """A folder name for a new run, from the date and time."""
    return _RUNS / datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")


def newest_run() -> Path:
    """The newest run with a checkpoint, of the runs without a name.

    Raises:
        TrainError: there is none.
    """
    runs = sorted(_RUNS.glob("*/checkpoints/step-*"), key=lambda path: path.parts)
    if not runs:
        raise TrainError(
            "resume latest: no run with a checkpoint under runs/; give the path of one"
        )
    return runs[-1].parents[1]
