"""The results of checks: one line each, with a level and, for a problem, what to do.

``Finding`` is one result, ``Diagnosis`` all of them. The checks are in ``here`` (one process),
``together`` (all ranks) and ``pairs`` (two ranks at a time).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

__all__ = ["Diagnosis", "Finding", "Level", "fail", "fine", "warn"]


class Level(Enum):
    """How a check ended."""

    OK = "ok"
    """Nothing to do."""
    WARN = "warn"
    """Training works, but is slower or less safe than it could be."""
    FAIL = "FAIL"
    """Training fails, or gives wrong numbers."""


@dataclass(frozen=True)
class Finding:
    """One result.

    Attributes:
        level: how the check ended.
        subject: a word for the check, such as ``shared memory``.
        text: the fact that was found.
        advice: what to do; empty if nothing.
        ranks: the ranks that have the problem; empty: all.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return one line."""
        found = f"{self.level.value:<5} {self.subject}: {self.text}"
        return f"{found}; {self.advice}" if self.advice else found


def fine(subject: str, text: str) -> Finding:
    """Return a finding with nothing to do."""
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, advice: str, ranks: Iterable[int] = ()) -> Finding:
    """Return a finding that makes training slower or less safe."""
    return Finding(Level.WARN, subject, text, advice, tuple(ranks))


def fail(subject: str, text: str, advice: str, ranks: Iterable[int] = ()) -> Finding:
    """Return a finding that makes training fail or wrong."""
    return Finding(Level.FAIL, subject, text, advice, tuple(ranks))


@dataclass(frozen=True)
class Diagnosis:
    """The results of a run of the doctor, equal on all ranks.

    Attributes:
        findings: the results, in the order of the checks.
    """

    findings: Sequence[Finding]

    @property
    def healthy(self) -> bool:
        """Whether no check failed. Warnings do not count."""
        return all(finding.level is not Level.FAIL for finding in self.findings)

    def __str__(self) -> str:
        """Return one line per result, and a last line with the counts."""
        counts = {level: [f.level for f in self.findings].count(level) for level in Level}
        end = (
            f"{counts[Level.OK]} checks passed, {counts[Level.WARN]} warnings, "
            f"{counts[Level.FAIL]} failures"
        )
        return "\n".join([*map(str, self.findings), end])

    def as_json(self) -> str:
        """Return the results as JSON: ``{"healthy": bool, "findings": [...]}``."""
        found = [{**asdict(each), "level": each.level.name.lower()} for each in self.findings]
        return json.dumps({"healthy": self.healthy, "findings": found}, indent=1)
