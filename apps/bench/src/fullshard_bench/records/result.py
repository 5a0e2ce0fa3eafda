"""The results that JSON files hold.

Owns the schema: these classes, which `fullshard_bench.records.conversion` reads and writes. Times
are in milliseconds, sizes in bytes; a name contains its unit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard_bench.errors import BenchError
from fullshard_bench.records.compact import compact_json
from fullshard_bench.records.conversion import from_table, to_table
from fullshard_bench.records.statistics import Estimate

__all__ = [
    "FORMAT",
    "Derived",
    "Entry",
    "Figures",
    "Point",
    "Result",
    "RunResult",
    "Traffic",
    "Verification",
    "read_result",
    "write_result",
]

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind in a step: how many, and the bytes that a rank must receive."""

    count: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The measurements of one contestant.

    Attributes:
        step_ms: each timed step, on the rank that took longest.
        silent_ms: the same of its twin, whose collectives move nothing; empty if not measured.
        host_ms: until the host had queued the step, of the twin if there is one.
        construction_ms: the contestant's own calls that shard the model.
        first_step_ms: the first step.
        groups: groups of parameters that are gathered and reduced.
        collectives: of a step, by kind.
        copied_bytes: of a step, outside collectives; -1 if not measured.
        left_bytes: what a host sends over its link in a step, headers included, of the host that
            sends most; -1 without links.
        copy_kernels_ms: time that the device spends in copies in a step; None on the CPU.
        padding_percent: what a gather moves beyond the parameters, in percent of them.
        memory: bytes: held between steps, after forward, peak in a step, and reserved on CUDA.
        losses: of the checked steps, the mean over ranks.
        norms: of the gradients of these steps; empty without clipping.
    """

    step_ms: tuple[float, ...]
    silent_ms: tuple[float, ...]
    host_ms: tuple[float, ...]
    construction_ms: float
    first_step_ms: float
    groups: int
    collectives: dict[str, Traffic]
    copied_bytes: int
    copy_kernels_ms: float | None
    padding_percent: float
    memory: dict[str, int]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    left_bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Figures derived from the figures; None where the other side was not measured.

    Attributes:
        step_ms: the median step.
        items_per_s: items (tokens) of all ranks per second, at the median step.
        over_unsharded: the step over the unsharded step.
        over_torch: the step over torch's.
        beyond_ms: the step less the unsharded step.
        exposed_ms: the step less the twin's.
        host_over_ms: host time over the unsharded step's.
        host_us_per_group: the same per group, in microseconds.
    """

    step_ms: Estimate
    items_per_s: float
    over_unsharded: Estimate | None
    over_torch: Estimate | None
    exposed_ms: Estimate | None
    host_over_ms: Estimate | None
    host_us_per_group: float | None
    beyond_ms: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The verdict of `fullshard.preflight.verify` on a contestant.

    `outcome` is `equal`, `different` or `not run`; `reason` contains the difference and its place,
    or why there is none.
    """

    outcome: str
    reason: str

    def __str__(self) -> str:
        """One line."""
        heads = {"equal": "losses agree", "different": "not equal", "not run": "not verified"}
        return f"{heads[self.outcome]} ({self.reason})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contestant on one mesh.

    `status` is `ok` (its losses are the unsharded model's), `wrong` (they are not: its time is not
    ranked), `failed` (it raised) or `unchecked` (nothing is moved, so losses mean nothing).
    """

    name: str
    status: str
    reason: str
    figures: Figures | None
    derived: Derived | None
    verification: Verification | None = None  # where it was asked for

    @property
    def is_ranked(self) -> bool:
        """Return whether its time may be compared."""
        return self.status in ("ok", "unchecked") and self.derived is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The contestants on one mesh; `kind` is `mesh`, or `wide` where nothing is moved."""

    kind: str
    mesh: str
    ranks: int
    entries: tuple[Entry, ...]
    reference_losses: tuple[float, ...]
    reference_norms: tuple[float, ...]

    def entry(self, name: str) -> Entry | None:
        """The contestant called `name`, if it took part."""
        return next((each for each in self.entries if each.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A model over several meshes."""

    name: str
    settings: dict[str, Any]
    parameters: int
    parameter_bytes: int
    item: str
    items_per_rank: int
    points: tuple[Point, ...]

    @property
    def wide_group(self) -> str:
        """The backend of its wide worlds, as in the settings; older results have but one."""
        return str(self.settings.get("wide_group", "silent"))

    @property
    def in_turns(self) -> bool:
        """Whether its wide worlds took turns step by step; in older results they did not."""
        return bool(self.settings.get("in_turns", False))

    def point(self, kind: str, mesh: str) -> Point | None:
        """The point of this kind and mesh, if it was measured."""
        return next((each for each in self.points if (each.kind, each.mesh) == (kind, mesh)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The runs of a command, the seconds that it took, and the definitions of its figures."""

    format: int
    created: str  # when, in UTC
    seconds: float
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    definitions: tuple[str, ...]
    runs: tuple[RunResult, ...]


def write_result(result: Result, path: Path) -> None:
    """Write the result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(compact_json(to_table(result)) + "\n", encoding="utf-8")


def read_result(path: Path) -> Result:
    """The result in a JSON file.

    Raises:
        BenchError: it is not there, or is no result of this format.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BenchError(f"{path}: not JSON: {error}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise BenchError(f"{path}: is no result of fullshard_bench in format {FORMAT}")
    try:
        return from_table(Result, table)
    except BenchError as error:
        raise BenchError(f"{path}: {error}") from error
