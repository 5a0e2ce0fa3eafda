"""The measurements of a run, one JSON object per line.

Owns the file: appending, reading back, and cutting it to a step when a run is resumed. A line has
    `kind` ("train", "held_out", "checkpoint" or "ranks") and `step`, the number of finished
updates; see `fullshard_train.training.trainer` for the rest. A number that is not finite is null,
as JSON has no word for it. TensorBoard's event files are optional; a run reads back this file.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fullshard_train.errors import TrainError

__all__ = [
    "JsonLines",
    "MetricsSink",
    "NoMetrics",
    "SeveralSinks",
    "TensorBoard",
    "finite",
    "keep_until",
    "read_metrics",
    "require_tensorboard",
]


class MetricsSink(Protocol):
    """Takes records as they are measured."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record."""
        ...

    def close(self) -> None:
        """Take no more."""
        ...


class NoMetrics:
    """The sink of the ranks that do not write."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Drop the record."""

    def close(self) -> None:
        """Has nothing to close."""


class JsonLines:
    """A sink that appends to a file, handing each line to the system at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(_line(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """`record` for strict JSON, which has neither NaN nor infinity: they become None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite(record), allow_nan=False) + "\n"


class SeveralSinks:
    """A sink that hands each record to several."""

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self._sinks = sinks

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand the record to each."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close each."""
        for sink in self._sinks:
            sink.close()


class TensorBoard:
    """A sink that writes TensorBoard's event files: a curve for each number, `<kind>/<name>`.

    Args:
        folder: the folder of the event files.
        step: updates done before; curves that a killed run drew further are hidden from there on.

    Raises:
        TrainError: as `require_tensorboard`.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        require_tensorboard()
        # Imported here: it takes seconds, and needs the extra.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1, flush_secs=10)

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a point to the curve of each number in the record."""
        for name, value in record.items():
            if name not in ("kind", "step"):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Bring the last points to the disk."""
        self._writer.close()


def require_tensorboard() -> None:
    """Pass if TensorBoard is installed.

    Raises:
        TrainError: it is not.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise TrainError(
            "config run.metrics = 'tensorboard': TensorBoard is not installed; pip install"
            " 'fullshard-train[tensorboard]', or use --set run.metrics=jsonl"
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a file, in order; a last line that was cut off by a kill is left out."""
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def keep_until(source: Path, target: Path, step: int) -> None:
    """Make `target` hold the records of `source` up to `step` updates; both may be one file.

    The file is replaced in one piece, so a kill leaves the old one or the new one.
    """
    records = read_metrics(source) if source.exists() else []
    temporary = target.with_name(target.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(_line(record) for record in records if record["step"] <= step)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
