"""Results of the commands as JSON values: a plan, a verdict, a report about races."""

from __future__ import annotations

from typing import Any

from fullshard.preflight.planning.report import Plan
from fullshard.preflight.races.report import Access, RaceReport
from fullshard.preflight.verification.verdict import Difference, Verdict

__all__ = ["plan_value", "races_value", "verdict_value"]


def plan_value(plan: Plan, budget: int | None) -> dict[str, Any]:
    """Return a plan: bytes and seconds, and whether it fits ``budget`` (None: no budget)."""
    return {
        "mesh": list(plan.mesh),
        "device": plan.device,
        "parameters": plan.parameters,
        "peak": plan.peak,
        "fits": None if budget is None else plan.fits(budget),
        "place": str(plan.place),
        "operation": plan.operation,
        "categories": {each.title: size for each, size in plan.categories.items() if size},
        "modules": plan.modules,
        "held": plan.held,
        "host": plan.host,
        "construction": plan.construction,
        "course": [[str(place), size] for place, size in plan.course.items()],
        "step_time": plan.step_time,
        "exposed": plan.exposed,
    }


def verdict_value(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict: whether both agree, the first difference, and its causes."""
    first = verdict.first
    return {
        "equal": verdict.equal,
        "steps": verdict.steps,
        "first": None if first is None else _difference(first),
        "others": list(verdict.others),
        "largest": None if verdict.largest is None else _difference(verdict.largest),
        "causes": [
            {"name": each.name, "evidence": each.evidence, "tested": each.tested}
            for each in verdict.causes
        ],
        "known": list(verdict.known),
        "notes": list(verdict.notes),
        "tolerance": str(verdict.tolerance),
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "phase": difference.phase.value,
        "step": difference.step,
        "name": difference.name,
        "module": difference.module,
        "error": difference.error,
        "allowed": difference.allowed,
        "ranks": list(difference.ranks),
    }


def races_value(report: RaceReport) -> dict[str, Any]:
    """Return a report about races: each with its memory, operations and source lines."""
    return {
        "ok": report.ok,
        "doubt": report.doubt,
        "races": [
            {
                "memory": race.memory,
                "kind": race.kind.value,
                "first": _access(race.first),
                "second": _access(race.second),
                "seen": count,
            }
            for race, count in report.races.items()
        ],
        "operations": report.operations,
        "collectives": report.collectives,
    }


def _access(access: Access) -> dict[str, Any]:
    return {
        "operation": access.operation,
        "stream": access.stream,
        "line": access.line,
        "writes": access.writes,
    }
