"""The contestants by name, and a user's own.

Owns the table and the checks that come before any rank starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from fullshard_bench.contestants.plain import build_ddp, build_none
from fullshard_bench.contestants.rival import build_torch, check_torch
from fullshard_bench.contestants.sharded import build_fullshard, check_fullshard
from fullshard_bench.contestants.training import Trainee
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.arena import Arena
from fullshard_bench.loading import load_object
from fullshard_bench.models.workload import Workload
from fullshard_bench.settings import Settings

__all__ = ["Builder", "build_contestant", "check_contestants"]

Builder = Callable[[Workload, Settings, Arena], Trainee]

_BUILDERS: dict[str, Builder] = {
    "fullshard": build_fullshard,
    "torch": build_torch,
    "ddp": build_ddp,
    "none": build_none,
}


def check_contestants(settings: Settings) -> None:
    """Raise before any rank starts if a contestant is not there or cannot do what is asked.

    Raises:
        BenchError: naming the contestant and what to do.
    """
    for name in settings.impl:
        if name == "fullshard":
            check_fullshard(settings)
        elif name == "torch":
            check_torch()
        elif name not in _BUILDERS:
            _check_own(name)


def _check_own(name: str) -> None:
    """Raise if a user's function cannot be called as a builder."""
    builder = load_object(name, "--impl")
    try:
        inspect.signature(builder).bind("workload", "settings", "arena")
    except (TypeError, ValueError) as error:
        raise BenchError(
            f"--impl {name}: cannot be called with a workload, settings and an arena: {error}; pass"
            " a function of these three that returns a fullshard_bench.Trainee"
        ) from error


def build_contestant(name: str, workload: Workload, settings: Settings, arena: Arena) -> Trainee:
    """The contestant called `name`, ready to train.

    Raises:
        BenchError: a user's function returned an object that is not a `Trainee`.
    """
    if name in _BUILDERS:
        return _BUILDERS[name](workload, settings, arena)
    trainee = load_object(name, "--impl")(workload, settings, arena)
    if not isinstance(trainee, Trainee):
        raise BenchError(
            f"--impl {name}: returned {type(trainee).__name__}; it must return a"
            " fullshard_bench.Trainee"
        )
    return trainee
