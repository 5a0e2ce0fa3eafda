"""Runs as they are on the disk: what ranks recorded, and losses of ``metrics.jsonl``."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fullshard.insight import OwnTimes, SlowRanksReport, compare_ranks

__all__ = ["Rank", "Run", "RunError", "read_run"]

_WARM = 3  # steps whose time does not count
METRICS = "metrics.jsonl"


class RunError(ValueError):
    """A folder without a run; the message has the remedy."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The record of one rank.

    Attributes:
        rank: its number.
        host: the name of its host.
        device: the type of its device.
        error: the error that ended the rank; empty if none did.
        seconds: from its start to its end.
        steps: steps of its optimizer.
        step_seconds: seconds from the end of one step to the end of the next.
        events: events of the engine, by kind, each with ``count`` and ``bytes``.
        peak_memory: bytes of tensors on an accelerator, or of the process on the CPU.
        own_times: own times of its latest steps; None if an earlier version recorded the run.
    """

    rank: int
    host: str
    device: str
    error: str
    seconds: float
    steps: int
    step_seconds: tuple[float, ...]
    events: dict[str, dict[str, int]]
    peak_memory: int
    own_times: OwnTimes | None = None

    @property
    def step(self) -> float | None:
        """Seconds of a step: the median, without the first steps."""
        times = self.step_seconds[_WARM:] or self.step_seconds
        return statistics.median(times) if times else None

    def bytes_of(self, *kinds: str) -> int:
        """Return the bytes of all events of some kinds."""
        return sum(self.events.get(kind, {}).get("bytes", 0) for kind in kinds)

    def count_of(self, *kinds: str) -> int:
        """Return the number of events of some kinds."""
        return sum(self.events.get(kind, {}).get("count", 0) for kind in kinds)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        name: the folder.
        ranks: the records of the ranks; empty without ``run --record``.
        world: the number of ranks; 0 without records.
        losses: losses of training, by step.
        held_out: losses on other data, by step.
    """

    name: str
    ranks: tuple[Rank, ...]
    world: int
    losses: dict[int, float]
    held_out: dict[int, float]

    @property
    def step(self) -> float | None:
        """Seconds of a step on the slowest rank."""
        times = [each.step for each in self.ranks if each.step is not None]
        return max(times, default=None)

    @property
    def slowest(self) -> int | None:
        """The rank with the longest step."""
        timed = [each for each in self.ranks if each.step is not None]
        return max(timed, key=lambda each: each.step or 0).rank if timed else None

    @cached_property
    def slow_ranks(self) -> SlowRanksReport | None:
        """What the own times of the ranks amount to; None without steps that all ranks know."""
        own = {each.rank: each.own_times for each in self.ranks if each.own_times is not None}
        if len(own) < 2 or len(own) < len(self.ranks):
            return None
        report = compare_ranks(own)
        return report if report.steps else None

    def value(self) -> dict[str, Any]:
        """Return the run as a JSON value."""
        return {
            "name": self.name,
            "ranks": self.world,
            "steps": max([each.steps for each in self.ranks] + [*self.losses], default=0),
            "step_seconds": self.step,
            "slowest_rank": self.slowest,
            "slow_ranks": None if self.slow_ranks is None else self.slow_ranks.value(),
            "gathered_bytes": max((r.bytes_of("all_gather") for r in self.ranks), default=0),
            "reduced_bytes": max((r.bytes_of("reduce_scatter") for r in self.ranks), default=0),
            "peak_memory": max((r.peak_memory for r in self.ranks), default=None),
            "first_loss": next(iter(self.losses.values()), None),
            "last_loss": next(reversed(self.losses.values()), None) if self.losses else None,
            "held_out_loss": next(reversed(self.held_out.values()), None)
            if self.held_out
            else None,
            "errors": {str(each.rank): each.error for each in self.ranks if each.error},
        }


def read_run(folder: Path) -> Run:
    """Return the run of a folder.

    Raises:
        RunError: if it has neither files of ranks nor metrics.
    """
    files = sorted(folder.glob("rank-*.json"))
    try:
        told = [json.loads(each.read_text()) for each in files]
        ranks = tuple(_rank(each) for each in told)
        losses = _losses(folder / METRICS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"{folder} has a file that cannot be read ({reason})") from error
    if not ranks and losses is None:
        raise RunError(
            f"{folder} has neither rank-*.json (of `fullshard run --record {folder}`) nor "
            f"{METRICS}; pass the folder of a run"
        )
    train, held_out = losses or ({}, {})
    return Run(
        name=str(folder),
        ranks=ranks,
        world=int(told[0]["ranks"]) if told else 0,
        losses=train,
        held_out=held_out,
    )


def _rank(told: dict[str, Any]) -> Rank:
    names = Rank.__dataclass_fields__
    kept = {name: value for name, value in told.items() if name in names}
    own = None if told.get("own_times") is None else OwnTimes.of(told["own_times"])
    return Rank(**{**kept, "step_seconds": tuple(told["step_seconds"]), "own_times": own})


def _losses(path: Path) -> tuple[dict[int, float], dict[int, float]] | None:
    """Return losses of training and on other data, by step; None without lines."""
    lines = (
        [line for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
    )
    losses: dict[str, dict[int, float]] = {"train": {}, "held_out": {}}
    for each in map(json.loads, lines):
        kind = each.get("kind", "train")
        if kind in losses and each.get("loss") is not None and "step" in each:
            losses[kind][int(each["step"])] = float(each["loss"])
    return (losses["train"], losses["held_out"]) if lines else None
