"""A logger of the user's beside the run's own files: Weights & Biases, or any other.

Owns the hook, ``run.logger = "module:function"``. The function is called on rank 0, before step 1,
with a `LoggedRun`; what it returns is a `fullshard_train.reporting.metrics.MetricsSink`: `write` is
given each record that metrics.jsonl gets (see `fullshard_train.training.trainer`), `close` is
called at the end of the run, whichever way it ends. Training never waits for a logger that has
failed: an error in either is told once, the logger gets nothing more, and the run goes on.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard_train.errors import TrainError
from fullshard_train.reporting.metrics import MetricsSink

__all__ = ["Forgiving", "LoggedRun", "find_logger", "start_logger"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """What a logger is told of a run.

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
    """The function of "module:function"; a module may lie in the working directory.

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


def start_logger(name: str, run: LoggedRun) -> Forgiving:
    """The logger of a run.

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
    return Forgiving(name, sink)


def _wrong(name: str, error: Exception) -> TrainError:
    return TrainError(f"config run.logger = {name!r}: {type(error).__name__}: {error}")


class Forgiving:
    """A sink that drops a logger once it raises, and says so."""

    def __init__(self, name: str, sink: MetricsSink) -> None:
        self._name = name
        self._sink: MetricsSink | None = sink

    def write(self, record: Mapping[str, Any]) -> None:
        """Hands a copy of the record on."""
        sink = self._sink
        if sink is not None:
            self._guarded("write", lambda: sink.write(dict(record)))

    def close(self) -> None:
        """Closes the logger, if it still is one."""
        sink = self._sink
        if sink is not None:
            self._guarded("close", sink.close)
            self._sink = None

    def _guarded(self, method: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # the user's own code
            self._sink = None
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(
                f"fullshard_train: warning: the logger {self._name} raised in {method}: {reason};"
                " it gets nothing more, training goes on",
                file=sys.stderr,
                flush=True,
            )
