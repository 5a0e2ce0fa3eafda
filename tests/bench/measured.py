"""Measurements in this process: a world of one rank, or one rank of a silent world."""

from __future__ import annotations

import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fullshard_bench.launching.job import Job, JobResult
from fullshard_bench.launching.world import local_world
from fullshard_bench.measuring.measurement import measure
from fullshard_bench.settings import Settings

TINY = "many:groups=2,width=8"


def settings(**changes: Any) -> Settings:
    """The settings of a measurement that takes no time."""
    values = {"model": TINY, "tokens": 2, "steps": 2, "checked": 2, "threads": 1, **changes}
    return Settings(**values)


def measured(chosen: Settings, *, kind: str = "mesh", mesh: str = "1") -> JobResult:
    """What `measure` returns, with the contestants' warnings left out as the worker does."""
    job = Job(settings=chosen, kind=kind, mesh=mesh, trace=False)
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory())
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        undo.callback(setattr, sys, "excepthook", sys.excepthook)  # torch puts one of its own
        with local_world(job, Path(folder), 0) as device:
            result = measure(job, device, lambda *_: None)
    assert result is not None
    return result
