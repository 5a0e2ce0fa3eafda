"""The command `plan-time`: planned and measured steps, on this machine.

Owns the cases and the order that the protocol fixes (docs/concepts/plan-time.md): each round plans
and then measures, every time in new processes. `record` stores the result, round by round.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from fullshard.preflight import Choice, Here, Links, Plan, plan
from fullshard_bench.contestants.training import make_optimizer
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.launch import run_ranks
from fullshard_bench.launching.machine import OtherWork
from fullshard_bench.launching.network import check_network
from fullshard_bench.models.registry import make_workload
from fullshard_bench.models.workload import Shape
from fullshard_bench.planning.record import Case, Recording, Round, Steps
from fullshard_bench.records.conversion import from_table, to_table

__all__ = ["CASES", "Task", "compare_times"]

CASES = (
    Case(model="gpt-mini", ranks=1, has_goal=True),
    Case(model="gpt-mini", ranks=2, has_goal=True),
    Case(model="gpt-small", ranks=1, has_goal=True),
    Case(model="gpt-small", ranks=2, has_goal=True),
    Case(model="gpt-mini", ranks=4),
    Case(model="gpt-small", ranks=4),
    Case(model="gpt-mini", ranks=2, network="1gbit"),
    Case(model="gpt-small", ranks=2, network="1gbit"),
)
_RANK = "fullshard_bench.planning.rank"
_OTHERS = 0.10  # of all cores; above it nothing is recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Task of a set of ranks, which they read from their folder.

    Attributes:
        case: the model and its ranks.
        shared: whether they share memory.
        links: whether they measure the links between them instead of steps.
    """

    case: Case
    shared: bool = False
    links: bool = False


def compare_times(
    names: Sequence[str], rounds: int, recording: Recording, console: Console
) -> None:
    """Plan and measure cases until a record has enough rounds of each; print each when it has.

    Args:
        names: of cases; none: all.
        rounds: how often each is planned and measured; those that the record has count.
        recording: keeps each round as soon as it is over.
        console: if it is known.

    Raises:
        BenchError: no case has such a name, this machine cannot make hosts, or a rank failed.
    """
    chosen = [each for each in CASES if not names or each.name in names]
    unknown = [name for name in names if name not in {each.name for each in CASES}]
    if unknown:
        known = "; ".join(each.name for each in CASES)
        raise BenchError(f"--case {'; '.join(unknown)}: must be among {known}")
    for case in chosen:
        if case.network:
            check_network(case.network)
    for case in chosen:
        before = recording.record.rounds(case)
        for _ in range(before, rounds):
            recording.add(case, _round(case))
        found = recording.record.of(case)
        kept = f"; {before} round(s) of an earlier command" if before else ""
        console.print(
            f"{case.name}: planned {found.planned_ms:.1f} ms, measured {found.measured_ms:.1f} ms,"
            f" ratio {found.ratio:.3f}; with shared memory {found.shared_ms:.1f} ms{kept}",
            highlight=False,
        )


def _round(case: Case) -> Round:
    """Plans, then measures.

    Raises:
        BenchError: if other processes kept the machine busy in that time; but between hosts, where
            the network's own work counts as theirs.
    """
    others = OtherWork()
    found = _planned_and_measured(case)
    share = others.share()
    if share > _OTHERS and not case.network:
        raise BenchError(
            f"{case.name}: other processes had {share:.1%} of this machine's cores meanwhile;"
            " nothing was recorded, repeat it when nothing else runs"
        )
    return replace(found, others=round(share, 3))


def _planned_and_measured(case: Case) -> Round:
    planned = _plan(case)
    assert planned.time is not None, "it is planned for a device"
    apart = _steps(case, shared=False)
    shared = apart if case.ranks == 1 or case.network else _steps(case, shared=True)
    return Round(
        planned_ms=1e3 * planned.time.step_time,
        exposed_ms=1e3 * planned.time.exposed,
        basis=planned.time.device.basis,
        planned_peak=planned.tensors,
        apart=apart,
        shared=shared,
    )


def _plan(case: Case) -> Plan:
    workload = make_workload(case.model, Shape(rows=case.rows, tokens=case.tokens))

    def build() -> torch.nn.Module:
        with torch.device("meta" if workload.on_meta else "cpu"):
            return workload.build()

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fullshard-bench-")))
        links = None
        if case.network:
            _run(Task(case=case, links=True), folder)
            links = Links.load(folder / "links.json")
        # A new file for each round, so that nothing is known from the one before.
        here = Here(threads=1, ranks=case.ranks, links=links, cache=folder / "costs.json")
        try:
            return plan(
                build,
                lambda: list(workload.batch(torch.Generator())),
                workload.loss,
                mesh=case.ranks,
                shard=partial(Choice().shard, workload.units),
                optimizer=lambda params: make_optimizer(list(params)),
                device=here,
            )
        except RuntimeError as error:
            raise BenchError(f"{case.name}: {error}") from error


def _steps(case: Case, *, shared: bool) -> Steps:
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as name:
        folder = Path(name)
        _run(Task(case=case, shared=shared), folder)
        return from_table(Steps, json.loads((folder / "steps.json").read_text("utf-8")))


def _run(task: Task, folder: Path) -> None:
    (folder / "task.json").write_text(json.dumps(to_table(task)), encoding="utf-8")
    run_ranks(_RANK, folder, task.case.ranks, threads=1, network=task.case.network)
