"""Weights & Biases in addition to a run's own files.

    pip install wandb
    cd examples/loggers && python -m fullshard_train --set run.logger=wandb_logger:make

Rank 0 calls `make` before the first step, then `write` with each record of metrics.jsonl, then
`close`. A run that is resumed continues its curves: the id is kept in the run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from fullshard_train.reporting.loggers import LoggedRun


class WandbLogger:
    """A curve `<kind>/<name>` for each number of a record, over steps."""

    def __init__(self, run: LoggedRun) -> None:
        kept = run.folder / "wandb-id.txt"
        self._run = wandb.init(
            project="fullshard",
            name=run.folder.name,
            id=kept.read_text() if kept.exists() else None,
            resume="allow",
            config=dict(run.config),
            dir=str(run.folder),
        )
        kept.write_text(self._run.id)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a point to each curve."""
        values = {
            f"{record['kind']}/{name}": value
            for name, value in record.items()
            if name not in ("kind", "step")
        }
        self._run.log(values, step=record["step"])

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()


make = WandbLogger
