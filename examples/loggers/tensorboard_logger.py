"""TensorBoard as a logger of one's own: start from this to choose which curves there are.

    pip install tensorboard
    cd examples/loggers && python -m fullshard_train --set run.logger=tensorboard_logger:make

For all curves as they are, `--set run.metrics=tensorboard` does without this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from fullshard_train.reporting.loggers import LoggedRun


class TensorBoardLogger:
    """Losses, speed and memory, and the run's settings as a text."""

    shown = ("loss", "accuracy", "items_per_second", "peak_memory_mib", "model_flops_utilisation")

    def __init__(self, run: LoggedRun) -> None:
        # Points that a killed run drew after its checkpoint are hidden.
        self._writer = SummaryWriter(str(run.folder / "events"), purge_step=run.step + 1)
        settings = "\n".join(f"    {name}: {value}" for name, value in run.config.items())
        self._writer.add_text("settings", settings)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a point to each curve that is shown."""
        for name in self.shown:
            if record.get(name) is not None:
                self._writer.add_scalar(f"{record['kind']}/{name}", record[name], record["step"])

    def close(self) -> None:
        """Brings the last points to the disk."""
        self._writer.close()


make = TensorBoardLogger
