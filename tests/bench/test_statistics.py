"""Medians, ratios and differences; records; verdicts; spans: what needs no ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fullshard_bench.errors import BenchError
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.records.conversion import from_table, to_table
from fullshard_bench.records.deriving import derive
from fullshard_bench.records.result import FORMAT, Entry, Figures, Point, Result, RunResult
from fullshard_bench.records.statistics import Estimate, difference, median, ratio
from fullshard_bench.reporting.bars import BARS, Verdict, judge
from fullshard_bench.reporting.compare import changes
from fullshard_bench.reporting.rows import notes_of
from fullshard_bench.reporting.trace import spans_of
from fullshard_bench.settings import Settings


def test_a_median_lies_in_its_interval_and_the_interval_in_the_values() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    found = median(values)
    assert found.value == 3.0
    assert min(values) <= found.low <= found.value <= found.high <= max(values)
    assert found == median(values)


def test_what_is_the_same_factor_in_every_round_has_an_interval_of_no_width() -> None:
    noisy = [1.0, 50.0, 2.0, 7.0, 3.0]
    found = ratio([2 * each for each in noisy], noisy)
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)
    assert difference(noisy, noisy).high == 0.0


def test_ratios_need_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="rounds"):
        ratio([1.0, 2.0], [1.0])


def test_a_mesh_is_read_as_it_is_written() -> None:
    for text in ("1", "4", "2x4"):
        assert str(parse_mesh(text)) == text
    assert parse_mesh("2x4").ranks == 8


def _figures(**changes: Any) -> Figures:
    values: dict[str, Any] = {
        "step_ms": (10.0, 10.0),
        "silent_ms": (),
        "host_ms": (10.0, 10.0),
        "construction_ms": 1.0,
        "first_step_ms": 1.0,
        "groups": 2,
        "collectives": {},
        "copied_bytes": 100,
        "copy_kernels_ms": None,
        "padding_percent": 0.0,
        "memory": {"held": 1, "forward": 2, "peak": 3},
        "losses": (1.0,),
        "norms": (),
    }
    return Figures(**{**values, **changes})


def _entry(name: str, status: str = "ok", **changes: Any) -> Entry:
    return Entry(name=name, status=status, reason="", figures=_figures(**changes), derived=None)


def _result(run: str, point: Point) -> Result:
    only = RunResult(
        name=run,
        settings={},
        parameters=1,
        parameter_bytes=4,
        item="rows",
        items_per_rank=1,
        points=(point,),
    )
    return Result(
        format=FORMAT,
        created="2024-02-29",
        seconds=1.0,
        command="",
        machine={},
        versions={},
        definitions=(),
        runs=(only,),
    )


def _point(*entries: Entry, kind: str = "mesh", mesh: str = "2") -> Point:
    return Point(
        kind=kind,
        mesh=mesh,
        ranks=2,
        entries=derive(entries, items=10),
        reference_losses=(),
        reference_norms=(),
    )


def test_what_follows_is_taken_from_torch_and_from_the_unsharded_step() -> None:
    ours, _, _ = _point(
        _entry("fullshard", step_ms=(30.0, 30.0), silent_ms=(24.0, 24.0), host_ms=(16.0, 16.0)),
        _entry("torch", step_ms=(60.0, 60.0)),
        _entry("none", groups=0),
    ).entries
    derived = ours.derived
    assert derived is not None
    assert derived.over_unsharded is not None
    assert derived.over_torch is not None
    assert derived.exposed_ms is not None
    assert (derived.over_unsharded.value, derived.over_torch.value) == (3.0, 0.5)
    assert derived.exposed_ms.value == 6.0
    assert derived.host_us_per_group == 6.0 * 1e3 / 2
    assert derived.items_per_s == pytest.approx(10 / 0.03, rel=1e-3)


@pytest.mark.parametrize(
    ("copied", "status", "word"),
    [(15, "ok", "met"), (16, "ok", "not met"), (1, "wrong", "not measured")],
)
def test_a_bar_is_met_below_its_limit_and_only_by_who_is_right(
    copied: int, status: str, word: str
) -> None:
    (bar,) = (each for each in BARS if each.what.startswith("bytes copied"))
    point = _point(
        _entry("fullshard", status, copied_bytes=copied), _entry("torch"), _entry("none")
    )
    verdicts = {verdict.bar: verdict.word for verdict in judge(_result(bar.run, point))}
    assert verdicts.pop(bar) == word
    others = [each for each in verdicts if (each.run, each.mesh) != (bar.run, bar.mesh)]
    assert {verdicts[each] for each in others} == {"not measured"}


def test_a_bar_may_be_of_another_rival_than_torch() -> None:
    (bar,) = (each for each in BARS if each.rival != "torch")
    steps = {"fullshard": 90.0, "ddp": 100.0, "none": 50.0}
    entries = [_entry(name, step_ms=(ms,) * 3) for name, ms in steps.items()]
    with_torch = (*entries, _entry("torch", step_ms=(300.0,) * 3))
    for found, word in ((with_torch, "met"), (entries, "met"), (with_torch[::2], "not measured")):
        run = _result(bar.run, _point(*found, mesh=bar.mesh))
        verdicts = {each.bar: each for each in judge(run)}
        assert verdicts[bar].word == word
    assert bar.rival == "ddp" and "DDP" in bar.what


def _wide_run(run: str, ours: tuple[float, ...], theirs: tuple[float, ...]) -> RunResult:
    plain = _entry("none", groups=0, host_ms=(10.0,) * len(ours))
    entries = (_entry("fullshard", host_ms=ours), _entry("torch", host_ms=theirs), plain)
    points = [_point(*entries, kind="wide", mesh=mesh) for mesh in ("8", "1024")]
    return dataclasses.replace(_result(run, points[0]).runs[0], points=tuple(points))


def test_host_time_is_judged_over_each_group_by_its_own_run() -> None:
    silent = _wide_run("40 groups of 9", (14.0, 14.0), (20.0, 20.0))
    fake = _wide_run("40 groups of 9, torch's fake group", (11.0, 11.0), (20.0, 20.0))
    result = dataclasses.replace(_result("", silent.points[0]), runs=(silent, fake))
    found = {
        (each.bar.run, each.bar.mesh, bool(each.bar.base)): (each.found, each.word)
        for each in judge(result)
        if each.bar.what.startswith("host time")
    }
    assert set(found) == {
        (run.name, mesh, grows)
        for run in (silent, fake)
        for mesh, grows in (("8", False), ("1024", False), ("1024", True))
    }
    for run, value, words in ((silent, 0.4, ("not met",) * 2), (fake, 0.1, ("met",) * 2)):
        for mesh, word in zip(("8", "1024"), words, strict=True):
            estimate, said = found[run.name, mesh, False]
            assert estimate is not None
            assert (estimate.value, said) == (value, word)
        growth, said = found[run.name, "1024", True]
        assert growth is not None
        assert (growth.value, said) == (1.0, "met")


def test_both_groups_are_held_to_the_same_limits_and_every_bar_says_which_it_is() -> None:
    limits: dict[str, list[float]] = {}
    for bar in BARS:
        if bar.run.startswith("40 groups"):
            limits.setdefault(bar.run, []).append(bar.limit)
            assert ("fake group" if "fake" in bar.run else "silent group") in bar.what
    first, second = limits.values()
    assert first == second
    assert len({bar.what for bar in BARS}) == len(BARS)


def test_a_bar_is_inconclusive_where_its_limit_or_none_of_torchs_excess_may_be_true() -> None:
    run = _wide_run("40 groups of 9", (10.0, 10.0, 10.0), (9.0, 20.0, 9.5))
    verdicts = judge(dataclasses.replace(_result("", run.points[0]), runs=(run,)))
    (verdict,) = (each for each in verdicts if each.bar.mesh == "8" and each.bar.run == run.name)
    assert verdict.found is not None
    assert (verdict.found.high, verdict.word) == (float("inf"), "inconclusive")
    (bar,) = (each for each in BARS if each.what == "step, 2 ranks, gpt-small, 16 tokens")
    for low, high, word in ((-0.1, 0.0, "met"), (-0.1, 0.1, "inconclusive"), (0.01, 1, "not met")):
        found = Estimate(value=bar.limit, low=bar.limit + low, high=bar.limit + high)
        assert Verdict(bar=bar, found=found, torch_text="1").word == word


@pytest.mark.parametrize(
    ("before", "after", "mark"),
    [
        ((100.0, 100.0), (102.0, 102.0), "!"),
        ((99.0, 101.0, 100.0), (98.0, 102.0, 100.0), ""),
        ((80.0, 120.0, 100.0), (85.0, 130.0, 100.0), "?"),
    ],
)
def test_a_comparison_says_where_it_shows_nothing(
    before: tuple[float, ...], after: tuple[float, ...], mark: str
) -> None:
    first, second = (
        _result("tiny", _point(_entry("fullshard", step_ms=steps, silent_ms=(), host_ms=steps)))
        for steps in (before, after)
    )
    rows = {row[3]: row[0] for row in changes(first, second)}
    assert rows["step ms"] == mark


def test_exposed_communication_below_0_is_explained() -> None:
    point = _point(
        _entry("fullshard", step_ms=(20.0, 20.0), silent_ms=(24.0, 24.0)),
        _entry("torch", step_ms=(60.0, 60.0), silent_ms=(24.0, 24.0)),
        _entry("none", groups=0),
    )
    (note,) = notes_of(point.entries)
    assert note.startswith("fullshard: exposed communication below 0: the same step")


def test_a_result_that_names_no_group_of_wide_worlds_is_compared_with_the_silent_one() -> None:
    old = _result("many", _point(_entry("fullshard"), kind="wide", mesh="8"))
    chosen = [Settings(model="many", wide_group=group) for group in ("silent", "fake")]
    silent, fake = (dataclasses.replace(old.runs[0], settings=to_table(each)) for each in chosen)
    before = {key: value for key, value in silent.settings.items() if key != "wide_group"}
    first = dataclasses.replace(silent, settings=before)
    assert [each.wide_group for each in (first, silent, fake)] == ["silent", "silent", "fake"]
    changed = _point(_entry("fullshard", copied_bytes=7), kind="wide", mesh="8")

    def differences(other: RunResult) -> int:
        runs = (dataclasses.replace(other, points=(changed,)),)
        results = (dataclasses.replace(old, runs=each) for each in ((first,), runs))
        return sum(row[3] == "copied" for row in changes(*results))

    assert differences(silent) == 1
    assert differences(fake) == 0


def test_a_record_is_read_back_equal() -> None:
    result = _result("run", _point(_entry("fullshard"), _entry("none", groups=0)))
    assert from_table(Result, to_table(result)) == result


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.pop("command"), "command: is missing"),
        (lambda table: table.update(speed=1), "speed: no such entry"),
        (lambda table: table.update(created=3), "created = 3"),
        (lambda table: table["runs"][0].update(points="none"), "runs[0].points"),
    ],
)
def test_a_record_with_a_wrong_entry_is_refused_with_its_place(change: Any, said: str) -> None:
    table = to_table(_result("run", _point(_entry("none"))))
    change(table)
    with pytest.raises(BenchError) as error:
        from_table(Result, table)
    assert said in str(error.value)


def _event(kind: str, us: float, name: str = "a") -> dict[str, Any]:
    return {"kind": kind, "name": name, "nbytes": 0, "stream": "", "us": us}


def test_spans_reach_from_their_beginning_to_their_end_or_the_end_of_the_step() -> None:
    events = [
        _event("unshard", 1.0),
        _event("unshard", 2.0, "b"),
        _event("wait", 3.0),
        _event("reduce", 4.0),
        _event("end", 9.0, ""),
    ]
    spans = [dataclasses.astuple(span) for span in spans_of(events)]
    assert spans == [
        ("gather", "gather", "a", 1.0, 3.0),
        ("gather", "gather", "b", 2.0, 9.0),
        ("reduce", "reduce", "a", 4.0, 9.0),
    ]
