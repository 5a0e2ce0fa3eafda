"""The program of one rank of ``fullshard run --record FOLDER``: a script, and a file about it.

``python -m fullshard.cli.running.recorded FOLDER script.py ...``. A file has the times of the
optimizer's steps, the engine's events with their bytes, the peak of memory, and the own time of the
latest steps by phase and module.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fullshard.comm import observe
from fullshard.insight import SlowRanks, StatisticsObserver
from fullshard.wrappers.spi import run_program

__all__ = ["file_of", "main", "recording"]

_MOST_STEPS = 1_000_000


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank-{rank:05}.json"


class _Steps:
    """The times at which the first optimizer of the program ended its steps."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._first: int | None = None

    def __call__(self, optimizer: Any, *given: Any) -> None:
        self._first = self._first or id(optimizer)
        if id(optimizer) == self._first and len(self.times) < _MOST_STEPS:
            self.times.append(time.perf_counter())


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Record what this rank does inside, and write it at the end, also after an error."""
    began, steps, error = time.perf_counter(), _Steps(), ""
    observer, watch = StatisticsObserver(), SlowRanks()
    hook = register_optimizer_step_post_hook(steps)
    try:
        with observe(observer), watch:
            yield
    except BaseException as raised:
        done = isinstance(raised, SystemExit) and not raised.code
        error = "" if done else f"{type(raised).__name__}: {raised}"
        raise
    finally:
        hook.remove()
        rank = int(os.environ.get("RANK", "0"))
        told = observer.statistics()
        value = {
            "rank": rank,
            "ranks": int(os.environ.get("WORLD_SIZE", "1")),
            "host": socket.gethostname(),
            "device": _device(),
            "torch": torch.__version__,
            "error": error,
            "seconds": time.perf_counter() - began,
            "steps": len(steps.times),
            "step_seconds": [b - a for a, b in zip(steps.times, steps.times[1:], strict=False)],
            "events": {
                str(kind): {"count": count, "bytes": told.nbytes[kind]}
                for kind, count in told.counts.items()
                if count
            },
            "peak_memory": _peak_memory(),
            "own_times": watch.own_times().value(),
        }
        folder.mkdir(parents=True, exist_ok=True)
        file_of(folder, rank).write_text(json.dumps(value) + "\n")


def _device() -> str:
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return "cpu" if accelerator is None else accelerator.type


def _peak_memory() -> int:
    """Return the peak in bytes: of tensors on an accelerator, or of this process on the CPU."""
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(words: list[str]) -> None:
    """Run a program on record."""
    with recording(Path(words[0])):
        run_program(words[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
