"""A user's logger in addition to the run's own files: Weights & Biases, or any other.

Owns the hook, ``run.logger = "module:function"``. The function is called on rank 0, before step 1,
with a `LoggedRun`; what it returns is a `fullshard_train.reporting.metrics.MetricsSink`: `write` is
given each record that metrics.jsonl gets (see `fullshard_train.training.trainer`), `close` is
called at the end of the run, whichever way it ends. Both methods run in a separate thread of the
logger, so training never waits for a slow logger. A logger that raises, or falls far behind, is
reported once and then removed; the end of a run waits a bounded time. The run continues.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard_train.errors import TrainError
from fullshard_train.reporting.metrics import MetricsSink

__all__ = ["Forgiving", "LoggedRun", "find_logger", "start_logger"]


_BEHIND = 10_000
"""How many records may wait for a logger; one record is about a kilobyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The information about a run for a logger.

    Attributes:
        folder: the run's own, where a logger may keep an id to continue by.
        config: the run's settings, a nested table of sections.
        step: updates done before; a resumed run writes steps from here on again.
        ranks: how many there are.
    """

    folder: Path
    config: Mapping[str, Mapping[str, Any]]
    step: int
    ranks: int


def find_logger(name: str) -> Callable[[LoggedRun], MetricsSink]:
    """The function of "module:function"; a module may be in the working directory.

    Raises:
        TrainError: it is not there, or cannot be imported.
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module of the user's may raise anything
        raise _wrong(name, error) from error
    if not callable(found):
        raise TrainError(f"config run.logger = {name!r}: {found!r} is no function")
    logger: Callable[[LoggedRun], MetricsSink] = found
    return logger


def start_logger(name: str, run: LoggedRun, *, patience: float) -> Forgiving:
    """The logger of a run, for whose end that waits at most `patience` seconds.

    Raises:
        TrainError: it raised, or made something that is no logger.
    """
    make = find_logger(name)
    try:
        sink = make(run)
    except Exception as error:  # the user's own code
        raise _wrong(name, error) from error
    for method in ("write", "close"):
        if not callable(getattr(sink, method, None)):
            raise TrainError(
                f"config run.logger = {name!r}: made {sink!r}, which has no {method}(); it must"
                " have write(record) and close()"
            )
    return Forgiving(name, sink, patience=patience)


def _wrong(name: str, error: Exception) -> TrainError:
    return TrainError(f"config run.logger = {name!r}: {type(error).__name__}: {error}")


class Forgiving:
    """A sink that hands records on in a thread, and drops a logger that raises or hangs.

    Args:
        name: what warnings call it.
        sink: the logger.
        patience: how many seconds `close` waits for it.
    """

    def __init__(self, name: str, sink: MetricsSink, *, patience: float) -> None:
        self._name = name
        self._sink = sink
        self._patience = patience
        self._records: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._dropped = False
        self._thread = threading.Thread(target=self._hand_on, name="logger", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        """Hand a copy of the record on, and return at once."""
        if self._dropped:
            return
        if self._records.qsize() >= _BEHIND:
            self._drop(f"is {_BEHIND:,} records behind")
            return
        self._records.put(dict(record))

    def close(self) -> None:
        """Close the logger once it has all records, unless it was dropped or takes too long."""
        if self._dropped or not self._thread.is_alive():
            return
        self._records.put(None)
        self._thread.join(self._patience)
        if self._thread.is_alive():
            self._drop(f"has not taken all records and closed within {self._patience:g} seconds")

    def _hand_on(self) -> None:
        while not self._dropped:
            record = self._records.get()
            method = "close" if record is None else "write"
            try:
                if record is None:
                    self._sink.close()
                    return
                self._sink.write(record)
            except Exception as error:  # the user's own code
                self._drop(f"raised in {method}: {type(error).__name__}: {error}".splitlines()[0])

    def _drop(self, reason: str) -> None:
        self._dropped = True
        print(
            f"fullshard_train: warning: the logger {self._name} {reason}; it gets nothing more,"
            " the run goes on",
            file=sys.stderr,
            flush=True,
        )
