"""The command ``plan``: a row for each mesh and choice, curves, and what fits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fullshard_bench.cli import main

WORDS = ["plan", "--jobs", "1", "--model", "gpt-tiny", "--tokens", "32", "--mesh", "4"]


def _rows(printed: str) -> list[list[str]]:
    table = [line.split("│") for line in printed.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row[1:-1]] for row in table]


def test_each_mesh_and_choice_has_a_row_and_the_first_that_fits_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["2x8", "--checkpointing", "no", "yes", "--dtype", "float32", "--budget", "1GiB"]
    assert main([*WORDS, *words]) == 0
    printed = capsys.readouterr().out
    rows = _rows(printed)
    choices = ["defaults", "recompute"]
    assert [row[:2] for row in rows] == [[mesh, each] for mesh in ("4", "2x8") for each in choices]
    assert {row[-1] for row in rows} == {"yes"}
    assert "The first that fits 1.00 GiB: 4 ranks, defaults." in printed
    peaks = [float(row[2].split()[0]) for row in rows]
    assert peaks[1] < peaks[0]


@pytest.mark.matrix
def test_stages_of_zero_are_rows_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--zero", "1", "2", "3", "--dtype", "float32"]) == 0
    rows = _rows(capsys.readouterr().out)
    assert [row[1] for row in rows] == ["ZeRO-1", "ZeRO-2", "defaults"]  # stage 3 is the default
    peaks = [float(row[2].split()[0]) for row in rows]
    assert peaks[0] >= peaks[1] > peaks[2]


def test_on_a_device_the_quickest_that_fits_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--device", "h100", "--reshard", "default", "never"]) == 0
    printed = capsys.readouterr().out
    rows = _rows(printed)
    speeds = [float(row[7]) for row in rows]
    best = rows[speeds.index(max(speeds))]
    assert f"The quickest that fits 74.51 GiB: 4 ranks, {best[1]}, {best[7]} tokens/s" in printed
    assert all(row[6].endswith("%") and row[3].endswith("ms") for row in rows)


@pytest.mark.matrix
def test_meshes_are_curves_and_files_have_all_that_was_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["8", "2x8", "--device", "h100", "--offload", "no", "yes", "--out"]
    assert main([*WORDS, *words, str(tmp_path / "tiny")]) == 0
    printed = capsys.readouterr().out
    assert "host" in next(line for line in printed.splitlines() if "choices" in line)
    table = (tmp_path / "tiny.md").read_text()
    weak, strong = table.split("### Weak scaling: ")[1].split("### Strong scaling: ")
    assert weak.startswith("128 tokens on each rank")
    assert strong.startswith("2,048 tokens on all ranks together")
    weak_rows, strong_rows = (
        [
            line.split(" | ")
            for line in each.splitlines()
            if line.startswith(("| 4", "| 8", "| 2x8"))
        ]
        for each in (weak, strong)
    )
    assert [row[0] for row in weak_rows] == ["| 4", "| 8", "| 2x8"]
    assert [row[3] for row in strong_rows] == ["4", "2", "1"], "micro-batches of a shared batch"
    seconds = [float(row[4].removesuffix(" s")) for row in strong_rows]
    assert seconds == sorted(seconds, reverse=True)
    for name in ("tiny.png", "tiny_best.png"):
        assert f"]({name})" in table
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "The quickest that fits" in table
    assert json.loads((tmp_path / "tiny_best.json").read_text())["traceEvents"]


@pytest.mark.matrix
def test_this_machine_is_measured_and_the_best_is_a_picture_and_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture, trace, costs = (tmp_path / name for name in ("plan.svg", "step.json", "costs.json"))
    words = ["plan", "--model", "gpt-tiny", "--rows", "1", "--tokens", "8", "--mesh", "1"]
    words += ["--device", "here", "--dtype", "float32", "--costs", str(costs)]
    assert main([*words, "--picture", str(picture), "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    (row,) = _rows(printed)
    assert row[3].endswith("ms")
    assert "Times measured on this machine" in printed
    assert "<svg" in picture.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert json.loads(costs.read_text())["settings"]


@pytest.mark.matrix
def test_without_choices_one_thing_at_a_time_is_changed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--rows", "2"]) == 0
    printed = capsys.readouterr().out
    assert [row[1] for row in _rows(printed)] == [
        "bfloat16",
        "bfloat16, ZeRO-2",
        "bfloat16, ZeRO-1",
        "bfloat16, keep gathered",
        "bfloat16, recompute",
        "bfloat16, keep gathered, recompute",
        "bfloat16, prefetch 2",
        "bfloat16, groups of 2",
        "bfloat16, 2 micro-batches",
        "bfloat16, offload",
        "defaults",
    ]
    assert "Ranks on accelerators; --device names one" in printed


@pytest.mark.matrix
def test_several_processes_plan_what_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--reshard", "default", "never", "--dtype", "bfloat16"]
    assert main([*WORDS, *words]) == 0
    alone = _rows(capsys.readouterr().out)
    assert main([*WORDS, *words, "--jobs", "2"]) == 0
    assert _rows(capsys.readouterr().out) == alone
    assert [row[1] for row in alone] == ["bfloat16", "bfloat16, keep gathered"]


def test_a_mixture_of_experts_is_planned_if_each_expert_takes_a_fixed_number_of_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--model", "moe", "--group", "1"]) == 0
    assert len(_rows(capsys.readouterr().out)) == 1
    assert main([*WORDS, "--model", "experts", "--group", "1"]) == 2
    assert "a fixed number of tokens" in capsys.readouterr().err


def test_a_budget_that_none_fits_is_said_with_the_least(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*WORDS, "--group", "1", "--budget", "1KiB"]) == 2
    said = capsys.readouterr()
    assert len(_rows(said.out)) == 1
    assert "None fits 1.0 KiB; the least is" in said.err
    assert "shards and optimizer state alone are" in said.err
    assert "Take more ranks that shard" in said.err


MINE = """
import torch
from torch import nn
from fullshard_bench import Shape, Workload


@torch.library.custom_op("plan_mine::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Net(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.layers, self.between = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), between

    def forward(self, x):
        for layer in self.layers:
            x = self.between(layer(x))
        return x


def _workload(shape, between):
    return Workload(
        name="mine",
        build=lambda: Net(between),
        units=lambda model: list(model.layers),
        batch=lambda generator: [torch.randn(shape.rows, 64, generator=generator)],
        loss=lambda model, batch: model(batch[0]).square().mean(),
        items=shape.rows,
        item="rows",
    )


def good(shape: Shape): return _workload(shape, torch.relu)
def asks(shape: Shape): return _workload(shape, lambda x: x if x.sum() > 0 else -x)
def operator(shape: Shape): return _workload(shape, lambda x: x + unknown(x.detach()))
def wrong(shape: Shape): return _workload(shape, lambda x: x @ torch.ones(3, 3))
def raises(shape: Shape): raise RuntimeError("no such thing")
def more(shape: Shape, other): return good(shape)
def number(shape: Shape): return 7
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a user's, in the folder in which the command is called."""
    (tmp_path / "plan_mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plan_mine", raising=False)


def test_a_model_of_the_users_own_is_planned(
    mine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--model", "plan_mine:good", "--group", "1", "--device", "h100"]) == 0
    assert "rows/s/device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("asks", "needs values, and a plan has none"),
        ("operator", "the operator plan_mine::unknown does not say what it returns"),
        ("wrong", "raised RuntimeError: a and b must have same reduction dim"),
        ("wrong", ", in plan_mine.py:"),
        ("raises", "raised RuntimeError: no such thing, in plan_mine.py:"),
        ("more", "must take a fullshard_bench.Shape and nothing else"),
        ("number", "returned int; it must take a Shape and return"),
        ("missing", "plan_mine has nothing callable named missing"),
    ],
)
def test_what_is_wrong_with_a_model_of_the_users_own_is_said_in_one_line(
    mine: None, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--model", f"plan_mine:{name}", "--group", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fullshard_bench: error: model 'plan_mine:{name}'")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--mesh", "0"],
        ["--mesh", "4", "--budget", "much"],
        ["--mesh", "4", "--reshard", "often"],
        ["--mesh", "4", "--micro-batches", "3"],
        ["--mesh", "4", "--rows", "2", "--micro-batches", "3"],
        ["--mesh", "4", "--group", "0"],
        ["--mesh", "4", "--model", "gpt-9t"],
        ["--mesh", "4", "--device", "z900"],
        ["--mesh", "4", "--device", "h100", "--picture", "no/such/folder/plan.png"],
        ["--mesh", "4", "--device", "h100", "--picture", "plan.txt"],
        ["--mesh", "4", "--trace", "step.json"],
        ["--mesh", "4", "--device", "h100", "--costs", "costs.json"],
    ],
)
def test_a_wrong_word_is_named_before_anything_is_planned(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr().err
    assert words[-1] in said or words[-2] in said
