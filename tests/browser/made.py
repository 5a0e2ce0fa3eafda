"""Pages of every kind, each about 1,000 parameters, many ranks or many contestants."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fullshard.cli.running.pages import run_parts
from fullshard.cli.running.runs import Rank, Run
from fullshard.insight import OwnTimes
from fullshard.insight import Phase as StepPhase
from fullshard.preflight import Cause, Difference, Phase, Tolerance, Verdict, plan
from fullshard.preflight.pages.contents import plan_parts, races_parts, verdict_parts
from fullshard.preflight.pages.page import write_page
from fullshard.preflight.races import Access, Kind, Race, RaceReport
from fullshard_bench.records.result import read_result
from fullshard_bench.reporting.page import write_result_page
from support.members import ROOT

__all__ = ["PAGES"]

_BLOCKS, _RANKS, _STEPS = 100, 64, 300


def _plan(path: Path) -> None:
    """A plan of 100 blocks of five layers: 1,000 parameters."""
    planned = plan(
        lambda: nn.Sequential(
            *(nn.Sequential(*(nn.Linear(16, 16) for _ in range(5))) for _ in range(_BLOCKS))
        ),
        torch.empty(8, 16),
        lambda model, batch: model(batch).square().mean(),
        mesh=4,
        device="h100",
    )
    write_page(path, "Plan of train.py", plan_parts([planned], 2 << 20))


def _verdict(path: Path) -> None:
    """A verdict on 1,000 parameters with wrong gradients."""
    names = [
        f"block.{block}.layer.{layer}.weight" for block in range(_BLOCKS) for layer in range(10)
    ]
    first = Difference(
        phase=Phase.GRADIENT, step=1, name=names[0], module="block.0.layer.0", error=2.0
    )
    verdict = Verdict(
        equal=False,
        steps=3,
        first=first,
        others=tuple(names[1:]),
        largest=first,
        causes=(Cause(name="loss scaled by ranks", evidence="half as large: 0.5", tested=True),),
        known=(),
        notes=("a note that is so long that it needs more than the width of a narrow window",),
        tolerance=Tolerance(dtype=torch.float32, world_size=2, stretch=1.0),
    )
    write_page(path, "Verdict on train.py", verdict_parts(verdict))


def _races(path: Path) -> None:
    """A report of 1,000 races."""
    races = {}
    for number in range(1000):
        one, two = (
            Access(f"aten::op{number}", stream, f"/home/user/project/train.py:{number}", writes)
            for stream, writes in (("default", True), ("gather", False))
        )
        races[Race(Kind.ACCESS, f"shard of block.{number}.weight", one, two)] = number + 1
    operations = {"default": 50_000, "gather": 2000, "reduce": 2000}
    report = RaceReport(races, operations, collectives=4000, ended=True)
    write_page(path, "Races of train.py", races_parts(report))


def _bench(path: Path) -> None:
    """A record with all its contestants, and the events of a step of 100 groups."""
    record = max((ROOT / "benchmarks").glob("cpu-set_*.json"))
    events = []
    for number in range(_BLOCKS):
        for kind, us in (
            ("unshard", 0),
            ("wait", 400),
            ("pre_forward", 410),
            ("post_forward", 900),
        ):
            events.append({"kind": kind, "name": f"blocks.{number}", "us": 1000.0 * number + us})
    result = read_result(record)
    write_result_page(replace(result, runs=result.runs[:2]), path, (tuple(events),))


def _rank(number: int, slow: float) -> Rank:
    steps = list(range(_STEPS - 50, _STEPS))
    own = {
        "steps": steps,
        "own": [
            [StepPhase.FORWARD, "blocks.0", [round(9000 * slow)] * len(steps)],
            [StepPhase.BACKWARD, "blocks.0", [20_000] * len(steps)],
        ],
        "waits": [["blocks.0", [500] * len(steps)]],
    }
    return Rank(
        rank=number,
        host=f"host{number // 8}",
        device="cuda",
        error="",
        seconds=100.0,
        steps=_STEPS,
        step_seconds=tuple(0.3 * slow + 0.01 * math.sin(step) for step in range(_STEPS)),
        events={kind: {"count": 10, "bytes": 10 << 20} for kind in ("all_gather", "copy_in")},
        peak_memory=(900 + number) << 20,
        own_times=OwnTimes.of(own),
    )


def _runs(path: Path) -> None:
    """Three runs, one of them with 64 ranks on record, one of which is slow."""
    losses = {
        name: {step: 4 * math.exp(-rate * step) + 2 for step in range(_STEPS)}
        for name, rate in (("runs/first", 0.01), ("runs/a-longer-name-of-a-run", 0.02))
    }
    runs = [
        Run(name=name, ranks=(), world=0, losses=found, held_out={0: 6.0, _STEPS - 1: 2.5})
        for name, found in losses.items()
    ]
    ranks = tuple(_rank(number, 1.5 if number == 17 else 1.0) for number in range(_RANKS))
    on_record = Run(name="runs/on-record", ranks=ranks, world=_RANKS, losses={}, held_out={})
    write_page(path, "runs", run_parts([*runs, on_record]))


PAGES: dict[str, Callable[[Path], None]] = {
    "plan": _plan,
    "verify": _verdict,
    "races": _races,
    "bench": _bench,
    "runs": _runs,
}
