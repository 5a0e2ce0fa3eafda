"""Results of the commands as JSON values: a plan, a verdict, a report about races."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fullshard.preflight.planning.report import Plan
from fullshard.preflight.races.report import RaceReport
from fullshard.preflight.verification.verdict import Verdict

__all__ = ["json_text", "plan_value", "races_value", "verdict_value"]


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
    return asdict(verdict) | {"tolerance": str(verdict.tolerance)}


def races_value(report: RaceReport) -> dict[str, Any]:
    """Return a report about races: each with its memory, operations and source lines."""
    return {
        "ok": report.ok,
        "doubt": report.doubt,
        "races": [
            asdict(race) | {"kind": race.kind.value, "seen": count}
            for race, count in report.races.items()
        ],
        "operations": report.operations,
        "collectives": report.collectives,
    }


def json_text(value: Any) -> str:
    """Return ``value`` as JSON that every parser reads: null for NaN and infinities."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
