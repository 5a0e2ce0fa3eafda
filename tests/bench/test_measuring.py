"""A measurement: every option once, contestants that are wrong, counts that can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.measured import TINY, measured, settings
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.job import Job
from fullshard_bench.launching.world import local_world
from fullshard_bench.records.result import Entry, Point
from fullshard_bench.settings import CONTESTANTS, WIDE_GROUPS
from support.products import few


def _entry(point: Point, name: str) -> Entry:
    entry = point.entry(name)
    assert entry is not None
    return entry


_OPTIONS: list[dict[str, Any]] = [
    {"model": "gpt-tiny:layers=1,width=16,vocabulary=32"},
    {"model": "experts:layers=1,width=16,count=2,heads=2", "tokens": 8},
    {"model": "bench.stand_ins:small", "impl": ("fullshard", "torch", "none"), "rows": 2},
    {"dtype": "bfloat16", "reduce_dtype": "float32"},
    {"reduce_dtype": "bfloat16", "impl": ("fullshard", "torch")},
    {"offload": True},
    {"reshard": "always", "prefetch": 2},
    {"reshard": "never", "prefetch": 0},
    {"checkpointing": True},
    {"comm": "bench.stand_ins:Gather", "impl": ("fullshard",)},
    {"transport": "process-group", "impl": ("fullshard",)},
    {"exposed": False, "clip": 0.0, "seed": 3},
]


@pytest.mark.parametrize(
    "options", few(_OPTIONS, _OPTIONS[0], *_OPTIONS[2:4], *_OPTIONS[9:11]), ids=",".join
)
def test_every_contestant_agrees_with_the_unsharded_model_under(options: dict[str, Any]) -> None:
    point = measured(settings(**options)).point
    found = {entry.name: (entry.status, entry.reason) for entry in point.entries}
    assert found == dict.fromkeys(options.get("impl", CONTESTANTS), ("ok", ""))
    assert all(len(entry.figures.step_ms) == 2 for entry in point.entries if entry.figures)


def test_a_contestant_whose_gradients_are_wrong_is_marked_and_not_ranked() -> None:
    impl = ("none", "bench.stand_ins:right", "bench.stand_ins:doubled")
    point = measured(settings(impl=impl)).point
    assert [entry.status for entry in point.entries] == ["ok", "ok", "wrong"]
    wrong = point.entries[2]
    assert not wrong.is_ranked
    assert wrong.reason.startswith("gradient norm")


def test_a_contestant_that_goes_wrong_while_it_is_timed_is_marked_too() -> None:
    impl = ("bench.stand_ins:right", "bench.stand_ins:forgetful")
    model = "gpt-tiny:layers=1,width=16,vocabulary=32"
    point = measured(settings(impl=impl, model=model, tokens=8, steps=40)).point
    assert [entry.status for entry in point.entries] == ["ok", "wrong"]
    assert "in the last step" in point.entries[1].reason


def test_a_contestant_that_raises_is_told_and_the_others_are_measured() -> None:
    point = measured(settings(impl=("bench.stand_ins:failing", "none"))).point
    failed, plain = point.entries
    assert (failed.status, failed.figures) == ("failed", None)
    assert "out of luck" in failed.reason
    assert plain.status == "ok"


@pytest.mark.parametrize(
    "options", [{"impl": ("bench.stand_ins:no_trainee",)}, {"model": "bench.stand_ins:no_workload"}]
)
def test_a_users_function_that_returns_something_else_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(BenchError, match="fullshard_bench"):
        measured(settings(**options))


def test_a_wide_world_has_the_calls_of_one_of_its_ranks_and_checks_no_losses() -> None:
    results = [measured(settings(), kind="wide", mesh=mesh).point for mesh in ("8", "64")]
    for point in results:
        assert {entry.status for entry in point.entries} == {"unchecked"}
        for name in ("fullshard", "torch"):
            figures = _entry(point, name).figures
            assert figures is not None
            # Two blocks gathered twice, the root once; three reductions; one norm. Ours are small,
            # so that the blocks are gathered together, and all is reduced at once.
            gathers, reductions = (3, 1) if name == "fullshard" else (5, 3)
            counts = {kind: traffic.count for kind, traffic in figures.collectives.items()}
            assert counts == {
                "all_gather": gathers,
                "all_reduce": 1,
                "reduce_scatter": reductions,
            }
    assert [point.ranks for point in results] == [8, 64]


@pytest.mark.matrix
def test_torchs_fake_group_gives_the_same_counts_as_the_silent_one() -> None:
    options = {"model": "many:groups=3,width=16", "impl": ("fullshard", "torch", "none")}
    points = [
        measured(settings(**options, wide_group=group), kind="wide", mesh="8").point
        for group in WIDE_GROUPS
    ]
    for name in options["impl"]:
        silent, fake = (_entry(point, name) for point in points)
        assert (silent.status, fake.status) == ("unchecked", "unchecked")
        assert silent.figures is not None
        assert fake.figures is not None
        assert fake.figures.collectives == silent.figures.collectives
        # What the group itself copies is no copy of a contestant's.
        assert fake.figures.copied_bytes == silent.figures.copied_bytes
        assert fake.figures.memory == silent.figures.memory


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")  # 2.11 has no other
def test_a_gather_over_torchs_fake_group_copies_and_over_the_silent_one_does_not() -> None:
    for group, expected in (("silent", 7.0), ("fake", 1.0)):
        job = Job(settings=settings(wide_group=group), kind="wide", mesh="8", trace=False)
        with local_world(job, Path(), 0) as device:
            output = torch.full((8,), 7.0, device=device)
            dist.all_gather_into_tensor(output, torch.ones(1, device=device))
        assert output.tolist() == [expected] * 8


def test_a_rank_of_a_wider_world_holds_less_and_the_unsharded_model_as_much() -> None:
    held: dict[str, list[int]] = {"fullshard": [], "torch": [], "none": []}
    for mesh in ("2", "8"):
        point = measured(settings(impl=tuple(held)), kind="wide", mesh=mesh).point
        for name, sizes in held.items():
            figures = _entry(point, name).figures
            assert figures is not None
            sizes.append(figures.memory["held"])
    # Everything is 8 long, so that 8 ranks hold a quarter of what 2 do, but for AdamW's counters.
    parameters = 2 * 9 + 2
    for name in ("fullshard", "torch"):
        first, second = (size - 4 * parameters for size in held[name])
        assert first == 4 * second
    assert held["none"][0] == held["none"][1]


def test_parameters_and_items_are_those_of_the_model() -> None:
    result = measured(settings(rows=3, impl=("none",)))
    # A block of width 8: a norm and a scale, three matrices with biases; the head is one more.
    assert result.parameters == 2 * (2 * 8 + 8 + 3 * (64 + 8)) + 64 + 8
    assert result.parameter_bytes == 4 * result.parameters
    assert (result.items_per_rank, result.item) == (6, "rows")
    assert TINY.startswith("many")
