"""The report of a card tells in its first line whether all held."""

from __future__ import annotations

from typing import Any

import pytest

from support.report.text import failed_parts, report_text


def _engine(peak: int) -> dict[str, Any]:
    times = {"step_s": 0.01, "host_s_per_group": 1e-4, "reserved_bytes": 2 * peak}
    return {"losses": [1.0], "peak_bytes": peak, **times}


def _found(**held: bool) -> dict[str, Any]:
    tests = {"ran": True, "held": True, "failed": [], "passed": 3, "skipped": 0}
    model = {"fullshard": _engine(9 << 20), "torch": _engine(10 << 20), "planned_bytes": 9 << 20}
    model["held"] = {"losses": True, "memory": True, "plan": True} | held
    found: dict[str, Any] = {"device": "a card", "torch": "2", "ranks": 2, "seconds": 5}
    found["library_bytes"] = 3 << 20
    found |= {"tests": tests, "sanitizer": tests | {"ran": False}, "models": {"gpt": model}}
    return found | {"failed": failed_parts(found)}


def test_the_first_line_tells_that_all_held() -> None:
    text = report_text(_found())
    assert text.startswith("**All held.**\n")
    assert "| gpt | yes | 9.00 | 10.00 | 9.00 | 0.900 |" in text


@pytest.mark.parametrize("part", ["losses", "memory", "plan"])
def test_the_first_line_names_what_did_not_hold(part: str) -> None:
    assert report_text(_found(**{part: False})).startswith(f"**Did not hold: {part} of gpt.**\n")
