"""The result of `plan-time`, as a record: a JSON file and a report.

Owns the figures that are compared: the median planned step over the median measured one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median as middle
from typing import Any

from fullshard_bench.errors import BenchError
from fullshard_bench.launching.machine import describe_machine, describe_versions
from fullshard_bench.records.compact import compact_json
from fullshard_bench.records.conversion import from_table, to_table
from fullshard_bench.records.statistics import Estimate, median
from fullshard_bench.reporting.report import markdown_table

__all__ = [
    "Case",
    "CaseResult",
    "PlanRecord",
    "Recording",
    "Round",
    "Steps",
    "read_plan_record",
    "rows_of_record",
    "write_plan_record",
]

GOAL = 0.15
HEADS = ("case", "planned ms", "measured ms", "ratio", "within 15 %", "with shared memory ms")
MEMORY_HEADS = (
    "case", "planned MiB", "measured MiB", "ratio", "with shared memory MiB", "ratio to it",
)  # fmt: skip
ROUND_HEADS = ("case", "round", "planned ms", "of it waiting ms", "measured ms", "others")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A planned and measured case.

    Attributes:
        model: as `fullshard_bench.models.registry.make_workload` reads it.
        ranks: that shard it, with one thread each.
        network: rate of the links between ranks as hosts, "" for ranks of one host.
        has_goal: whether the protocol has a goal for it.
        rows: of a rank's batch.
        tokens: of a row.
    """

    model: str
    ranks: int
    network: str = ""
    has_goal: bool = False
    rows: int = 1
    tokens: int = 256

    @property
    def name(self) -> str:
        """The case in words."""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        where = f", hosts at {self.network.replace('gbit', ' Gbit/s')}" if self.network else ""
        return f"{self.model}, {ranks}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Measured steps.

    Attributes:
        ms: milliseconds of each, on the rank that took longest.
        peak: bytes of all tensors alive at the worst moment of a step, on the first rank; shared
            memory in equal parts.
    """

    ms: tuple[float, ...]
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Plan of a case, and the measurement after it.

    Attributes:
        planned_ms: of a step.
        exposed_ms: of it, what waits for collectives.
        basis: what the plan measured.
        planned_peak: bytes.
        apart: steps through the process group.
        shared: steps whose ranks share memory; with one rank, or several hosts, the same.
        others: the part of all cores that other processes had; between hosts with the network's;
            None where that was not kept.
    """

    planned_ms: float
    exposed_ms: float
    basis: str
    planned_peak: int
    apart: Steps
    shared: Steps
    others: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The rounds of a case."""

    case: Case
    rounds: tuple[Round, ...]

    @property
    def planned_ms(self) -> float:
        """The median planned step."""
        return middle(each.planned_ms for each in self.rounds)

    @property
    def measured(self) -> Estimate:
        """The median measured step, with its 90 % interval."""
        return median([ms for each in self.rounds for ms in each.apart.ms])

    @property
    def measured_ms(self) -> float:
        """The median measured step."""
        return self.measured.value

    @property
    def shared_ms(self) -> float:
        """The median step of ranks that share memory."""
        return median([ms for each in self.rounds for ms in each.shared.ms]).value

    @property
    def ratio(self) -> float:
        """Planned over measured."""
        return self.planned_ms / self.measured_ms

    @property
    def is_met(self) -> bool:
        """Whether the plan is within the protocol's 15 %."""
        return abs(self.ratio - 1) <= GOAL


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """The result of the command, with place and date.

    Attributes:
        created: the day of the last round.
        command: those that added rounds, a line for each.
        machine: as `describe_machine`.
        versions: as `describe_versions`.
        cases: in the order in which they were first measured.
    """

    created: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    cases: tuple[CaseResult, ...]

    def rounds(self, case: Case) -> int:
        """How many rounds of a case it has."""
        return sum(len(each.rounds) for each in self.cases if each.case == case)

    def of(self, case: Case) -> CaseResult:
        """Return the record of a measured case."""
        return next(each for each in self.cases if each.case == case)

    def with_round(self, case: Case, found: Round, command: str) -> PlanRecord:
        """The record with one more round of a case, which this command measured."""
        cases = [
            replace(each, rounds=(*each.rounds, found)) if each.case == case else each
            for each in self.cases
        ]
        if not self.rounds(case):
            cases.append(CaseResult(case=case, rounds=(found,)))
        commands = dict.fromkeys([*self.command.splitlines(), command])
        return replace(
            self,
            created=date.today().isoformat(),
            command="\n".join(commands),
            cases=tuple(cases),
        )


def read_plan_record(path: Path) -> PlanRecord:
    """The record in a JSON file.

    Raises:
        BenchError: it is none.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BenchError(f"{path} is no record ({error}); name another file") from None
    return from_table(PlanRecord, table)


def rows_of_record(cases: Sequence[CaseResult]) -> list[tuple[str, ...]]:
    """A row for each case, under `HEADS`."""
    rows: list[tuple[str, ...]] = []
    for each in cases:
        measured = each.measured
        goal = ("yes" if each.is_met else "no") if each.case.has_goal else "no goal"
        alike = each.case.ranks == 1 or each.case.network
        rows.append((
            each.case.name,
            f"{each.planned_ms:.1f}",
            f"{measured.value:.1f} ({measured.low:.1f} to {measured.high:.1f})",
            f"{each.ratio:.2f}",
            goal,
            "-" if alike else f"{each.shared_ms:.1f}",
        ))  # fmt: skip
    return rows


def memory_rows(cases: Sequence[CaseResult]) -> list[tuple[str, ...]]:
    """A row for each case, under `MEMORY_HEADS`."""
    rows: list[tuple[str, ...]] = []
    for each in cases:
        first = each.rounds[0]
        alike = each.case.ranks == 1 or each.case.network
        planned, apart, shared = first.planned_peak, first.apart.peak, first.shared.peak
        rows.append((
            each.case.name,
            f"{planned / 2**20:.1f}",
            f"{apart / 2**20:.1f}",
            f"{planned / apart:.3f}",
            "-" if alike else f"{shared / 2**20:.1f}",
            "-" if alike else f"{planned / shared:.3f}",
        ))  # fmt: skip
    return rows


class Recording:
    """Record that a command adds rounds to; each round rewrites the files.

    Attributes:
        record: measurements of earlier commands and of this one.

    Args:
        command: as it was called.
        stem: of the files; None keeps none.

    Raises:
        BenchError: what is there is no record, or of another machine or other versions.
    """

    def __init__(self, command: str, stem: Path | None) -> None:
        """Read what an earlier command left."""
        self._command, self._stem = command, stem
        machine, versions = describe_machine(), describe_versions()
        self.record = PlanRecord(
            created="", command="", machine=machine, versions=versions, cases=()
        )
        path = None if stem is None else stem.with_name(f"{stem.name}.json")
        if path is not None and path.exists():
            self.record = read_plan_record(path)
            if (self.record.machine, self.record.versions) != (machine, versions):
                raise BenchError(f"{path}: of another machine or other versions; name another file")

    def add(self, case: Case, found: Round) -> None:
        """Add a round, and write the files."""
        self.record = self.record.with_round(case, found, self._command)
        if self._stem is not None:
            write_plan_record(self.record, self._stem)


def write_plan_record(record: PlanRecord, stem: Path) -> None:
    """Write `stem`.json and `stem`.md, each at once: a killed run leaves whole files."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    text = compact_json(to_table(record))
    _replace(stem.with_name(f"{stem.name}.json"), f"{text}\n")
    _replace(stem.with_name(f"{stem.name}.md"), markdown_of_record(record))


def _replace(path: Path, text: str) -> None:
    written = path.with_name(f"{path.name}.part")
    written.write_text(text, encoding="utf-8")
    written.replace(path)


def markdown_of_record(record: PlanRecord) -> str:
    """The record as a report."""
    machine = record.machine
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    rounds = [
        (each.case.name, f"{n + 1}", f"{one.planned_ms:.1f}", f"{one.exposed_ms:.1f}",
         f"{median(one.apart.ms).value:.1f}", "-" if one.others is None else f"{one.others:.1%}")
        for each in record.cases for n, one in enumerate(each.rounds)
    ]  # fmt: skip
    lines = [
        "# Planned against measured time",
        "",
        f"{record.created}: {machine['cpu']}, {machine['cores']} core(s), {machine['memory_gib']}"
        f" GiB, {machine['system']}; {versions}.",
        "",
        "```sh",
        record.command,
        "```",
        "",
        *markdown_table(HEADS, rows_of_record(record.cases)),
        "",
        "## Peak memory",
        "",
        *markdown_table(MEMORY_HEADS, memory_rows(record.cases)),
        "",
        "## Each round",
        "",
        *markdown_table(ROUND_HEADS, rounds),
        "",
        "## What each plan measured",
        "",
        *(f"- {each.case.name}: {each.rounds[0].basis}" for each in record.cases),
        "",
    ]
    return "\n".join(lines)
