"""`fullshard_train compare`: held-out losses of runs at equal steps and at equal time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fullshard_train.cli import main
from fullshard_train.commands.compare import compare_runs
from fullshard_train.settings.config import load_config, to_toml

EVALUATED = (10, 20, 30, 40)


def _run(
    folder: Path,
    optimizer: str,
    seed: int,
    losses: tuple[float, ...],
    seconds: float,
    wire: str = "as computed",
) -> Path:
    """A run of 40 steps; each evaluation takes five seconds."""
    folder.mkdir()
    words = [f"optim.optimizer={optimizer}", f"train.seed={seed}", "train.steps=40"]
    words.append(f"parallel.wire_dtype={wire}")
    (folder / "config.toml").write_text(to_toml(load_config([], words)))
    records: list[dict[str, object]] = []
    now = 0.0
    for step in range(1, 41):
        now += seconds
        records.append({"kind": "train", "step": step, "seconds": now})
        if step in EVALUATED:
            loss = losses[EVALUATED.index(step)]
            records.append({"kind": "held_out", "step": step, "loss": loss})
            now += 5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return folder


def test_what_travels_narrow_is_a_line_of_its_own(tmp_path: Path) -> None:
    losses = (4.0, 3.0, 2.0, 1.0)
    runs = [
        _run(tmp_path / "exact", "adamw", 0, losses, 0.1),
        _run(tmp_path / "int8", "adamw", 0, losses, 0.1, "int8"),
    ]
    assert [each.name for each in compare_runs(runs, [])] == [
        "adamw 0.004",
        "adamw 0.004, int8 on the wire",
    ]


def test_seeds_are_averaged_and_equal_time_is_that_of_the_first_run(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path / "a0", "adamw", 0, (4.0, 3.0, 2.0, 1.0), 0.1),
        _run(tmp_path / "a1", "adamw", 1, (5.0, 4.0, 3.0, 2.0), 0.1),
        _run(tmp_path / "m0", "muon", 0, (3.0, 2.0, 1.0, 0.5), 0.16),
    ]
    adamw, muon = compare_runs(runs, [])
    assert adamw.seeds == (0, 1) and adamw.mean == (4.5, 3.5, 2.5, 1.5)
    assert adamw.seconds == pytest.approx(0.1) and muon.seconds == pytest.approx(0.16)
    assert muon.at(25) == 1.5 and muon.at(1) == 3.0 and muon.at(99) == 0.5
    stem = tmp_path / "out" / "compared"
    assert main(["compare", *map(str, runs), "--out", str(stem)]) == 0
    table = stem.with_suffix(".md").read_text()
    assert "4.0 s of adamw 0.004's 40 steps" in table
    # 4 s are 25 steps of Muon: between 2.0 at 20 and 1.0 at 30
    assert "| muon 0.004 | 0 | 40 | 0.5000 | 0.0000 | 160 | 25 | 1.5000 |" in table
    assert "| adamw 0.004 | 0, 1 | 40 | 1.5000 | 1.0000 | 100 | 40 | 1.5000 |" in table
    record = json.loads(stem.with_suffix(".json").read_text())
    assert record["runs"][1]["held_out_losses"] == [[3.0, 2.0, 1.0, 0.5]]
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert main(["compare", *map(str, runs), "--no-times", "--out", str(stem)]) == 0
    assert "| adamw 0.004 | 0, 1 | 40 | 1.5000 | 1.0000 |" in stem.with_suffix(".md").read_text()
    assert "seconds" not in stem.with_suffix(".json").read_text()


def test_how_much_more_a_kind_loses_is_told_by_seed(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path / "a0", "adamw", 0, (4.0, 3.0, 2.0, 1.0), 0.1),
        _run(tmp_path / "a1", "adamw", 1, (5.0, 4.0, 3.0, 2.0), 0.1),
        _run(tmp_path / "n1", "adamw", 1, (5.0, 4.0, 3.0, 1.98), 0.1, "int8"),
        _run(tmp_path / "n0", "adamw", 0, (4.0, 3.0, 2.0, 1.05), 0.1, "int8"),
        _run(tmp_path / "m7", "muon", 7, (4.0, 3.0, 2.0, 1.0), 0.1),
    ]
    stem = tmp_path / "compared"
    assert main(["compare", *map(str, runs), "--no-times", "--out", str(stem)]) == 0
    exact, narrow, muon = stem.with_suffix(".md").read_text().splitlines()[-3:]
    assert exact.endswith("| +0.00 % (+0.00 to +0.00) |")
    assert narrow.endswith("| 1.5150 | 0.9300 | +2.00 % (-1.00 to +5.00) |")
    assert muon.endswith("| no seed in common |")


def test_times_of_other_runs_count_where_they_are_given(tmp_path: Path) -> None:
    runs = [_run(tmp_path / name, name, 0, (4.0, 3.0, 2.0, 1.0), 9.0) for name in ("adamw", "muon")]
    timed = _run(tmp_path / "timed", "muon", 3, (0.0, 0.0, 0.0, 0.0), 0.5)
    adamw, muon = compare_runs(runs, [timed])
    assert adamw.seconds == pytest.approx(9.0) and muon.seconds == pytest.approx(0.5)


def test_a_folder_without_a_run_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(tmp_path), "--out", str(tmp_path / "x")]) == 2
    assert "config.toml" in capsys.readouterr().err
