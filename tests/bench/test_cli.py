"""The program: tables, files, a wrong contestant in them, and one line for each mistake."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from bench.measured import TINY
from fullshard_bench.cli import main
from fullshard_bench.records.conversion import from_table, to_table
from fullshard_bench.records.result import Result, read_result
from fullshard_bench.reporting.bars import BARS
from fullshard_bench.running.run import Run
from fullshard_bench.running.suites import SUITES
from fullshard_bench.settings import Settings
from support.python import environment, run_python

BENCH = ("-m", "fullshard_bench")
_SMALL = ("--model", TINY, "--tokens", "2", "--steps", "3", "--checked", "2", "--threads", "1")


@dataclass(frozen=True, kw_only=True)
class _Done:
    """A finished command: its folder and what it printed."""

    folder: Path
    output: str

    @property
    def result(self) -> Result:
        return read_result(self.folder / "result.json")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> _Done:
    """Two ranks, verified, one of them wrong, and a wide world, with every output."""
    folder = tmp_path_factory.mktemp("bench")
    traced = ("--trace", f"{folder}/trace.json", "--timeline", f"{folder}/timeline.png")
    page = ("--html", f"{folder}/page.html")
    impl = ("--impl", "fullshard", "torch", "ddp", "none", "bench.stand_ins:deaf")
    words = ("run", "--mesh", "2", "--wide", "8", "--verify", *_SMALL, *impl, *traced, *page)
    printed = io.StringIO()
    with redirect_stdout(printed), mock.patch.dict(os.environ, environment()):  # of its ranks
        assert main([*words, "--pictures", "--out", f"{folder}/result"]) == 1  # one is wrong
    return _Done(folder=folder, output=printed.getvalue())


def test_two_ranks_are_measured_and_the_ones_that_do_not_share_are_marked(done: _Done) -> None:
    point = done.result.runs[0].points[0]
    assert (point.kind, point.mesh, point.ranks) == ("mesh", "2", 2)
    statuses = {entry.name: entry.status for entry in point.entries}
    right = dict.fromkeys(("fullshard", "torch", "ddp", "none"), "ok")
    assert statuses == {**right, "bench.stand_ins:deaf": "wrong"}
    for entry in point.entries:
        assert entry.figures is not None
        assert len(entry.figures.step_ms) == 3
        assert len(entry.figures.silent_ms) == (0 if entry.name == "none" else 3)


def test_the_table_and_the_report_do_not_rank_a_wrong_contestant(done: _Done) -> None:
    report = (done.folder / "result.md").read_text()
    for text in (done.output, report):
        assert "WRONG" in text
        assert "not ranked" in text
        assert "deaf: wrong: " in text
    rows = [line for line in report.splitlines() if line.startswith(("| 1 ", "|  |"))]
    assert any(line.startswith("|  | bench.stand_ins:deaf | WRONG | not ranked") for line in rows)


def test_what_verify_said_of_each_contestant_is_printed_and_kept(done: _Done) -> None:
    real, wide = done.result.runs[0].points
    said = {entry.name: entry.verification for entry in real.entries}
    outcomes = {name: each.outcome for name, each in said.items() if each is not None}
    assert outcomes == {
        **dict.fromkeys(("fullshard", "torch", "ddp"), "equal"),
        "none": "not run",
        "bench.stand_ins:deaf": "different",
    }
    assert {entry.verification for entry in wide.entries} == {None}
    for text in (done.output, (done.folder / "result.md").read_text()):
        assert "verify: fullshard: losses agree (2 steps, largest difference: " in text
        assert "verify: none: not verified (" in text


def test_it_says_plainly_that_nothing_is_moved_in_a_wide_world(done: _Done) -> None:
    assert "one rank of 8: nothing is moved" in done.output
    assert "one rank of 8: nothing is moved" in (done.folder / "result.md").read_text()


@pytest.mark.matrix
def test_a_wide_world_over_torchs_fake_group_is_named_and_kept(tmp_path: Path) -> None:
    words = ("run", "--wide", "8", "--wide-group", "fake", "--impl", "fullshard", "none", *_SMALL)
    output = run_python(*BENCH, *words, "--out", f"{tmp_path}/result")
    for text in (output, (tmp_path / "result.md").read_text()):
        assert "one rank of 8 over torch's `fake` group" in text
        assert "nothing is moved" not in text
    (run,) = read_result(tmp_path / "result.json").runs
    assert run.wide_group == "fake"


def test_the_result_is_read_back_as_it_was_written(done: _Done) -> None:
    table = json.loads((done.folder / "result.json").read_text())
    assert to_table(from_table(Result, table)) == table
    assert set(table["machine"]) == {"cpu", "cores", "memory_gib", "system", "gpus"}
    assert set(table["versions"]) == {"python", "torch", "numpy", "cuda", "fullshard"}
    assert table["command"].startswith("python -m fullshard_bench run --mesh 2")


def test_the_figures_definitions_are_printed_and_kept(done: _Done) -> None:
    joined = " ".join(done.output.split())
    for definition in done.result.definitions:
        assert definition in joined


def test_all_pictures_are_there_and_linked(done: _Done) -> None:
    report = (done.folder / "result.md").read_text()
    for what in ("time", "memory", "breakdown", "wide"):
        path = done.folder / f"result_{what}.png"
        assert path.read_bytes().startswith(b"\x89PNG")
        assert f"({path.name})" in report
    assert (done.folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_spans_of_the_first_ranks_step(done: _Done) -> None:
    text = (done.folder / "page.html").read_text()
    *_, last = re.findall(r"data-figure=[^>]*>(.*?)</script>", text)
    rows = {trace["name"]: len(trace["y"]) for trace in json.loads(last)["data"]}
    trace = json.loads((done.folder / "trace.json").read_text())["traceEvents"]
    spans = [each["cat"] for each in trace if each["ph"] == "X" and each["pid"] == 0]
    kinds = ("forward", "backward", "gather", "reduce")
    assert rows == {kind: spans.count(kind) for kind in kinds}
    assert min(rows.values()) > 0


def test_draw_makes_the_same_pictures_from_the_record(done: _Done, tmp_path: Path) -> None:
    record = done.folder / "result.json"
    assert main(["draw", str(record), "--out", f"{tmp_path}/again"]) == 0
    drawn = {path.name.replace("again", "result"): path for path in tmp_path.iterdir()}
    pictures = {path.name: path for path in done.folder.glob("result_*.png")}
    assert drawn.keys() == pictures.keys()
    for name, path in pictures.items():
        assert drawn[name].read_bytes() == path.read_bytes()


def test_the_trace_has_both_ranks_with_compute_gathers_and_reductions(done: _Done) -> None:
    entries = json.loads((done.folder / "trace.json").read_text())["traceEvents"]
    spans = [entry for entry in entries if entry["ph"] == "X"]
    for rank in (0, 1):
        counts = {
            what: sum(each["cat"] == what for each in spans if each["pid"] == rank)
            for what in ("forward", "backward", "gather", "reduce")
        }
        # Two blocks and the root; the root is gathered once, the blocks twice.
        assert counts == {"forward": 3, "backward": 3, "gather": 5, "reduce": 3}
    assert all(each["ts"] >= 0 and each["dur"] >= 0 for each in spans)


def test_comparing_a_result_with_itself_finds_no_difference(
    done: _Done, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(done.folder / "result.json")
    assert main(["compare", path, path]) == 0
    assert any(line.startswith("0 of ") for line in capsys.readouterr().out.splitlines())


@pytest.mark.matrix
def test_inside_torchrun_smaller_meshes_use_the_first_ranks(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    impl = ("--impl", "fullshard", "none")
    words = ["run", "--mesh", "1", "2", *_SMALL, *impl, "--out", f"{tmp_path}/result"]
    run_python(*launcher, *BENCH, *words)
    points = read_result(tmp_path / "result.json").runs[0].points
    assert [(point.mesh, point.ranks) for point in points] == [("1", 1), ("2", 2)]
    assert {entry.status for point in points for entry in point.entries} == {"ok"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run", "give --mesh or --wide"),
        ("run --mesh 2y", "mesh '2y'"),
        ("run --mesh 4096", "--wide 4096"),
        ("run --mesh 1 --model gpt-huge", "allowed: gpt-tiny"),
        ("run --mesh 1 --model many:depth=3", "'depth=3'"),
        ("run --mesh 1 --model gpt-tiny:heads=3", "no multiple of heads"),
        ("run --mesh 1 --model no.module:make", "cannot import no.module"),
        ("run --mesh 4 --model gpt-8b", "GiB"),
        ("run --mesh 1 --impl deepspeed", "fullshard, torch, ddp, none"),
        ("run --mesh 1 --impl json:nothing", "nothing callable"),
        ("run --mesh 1 --impl json:dumps", "that returns a fullshard_bench.Trainee"),
        ("run --mesh 1 --comm json:dumps", "a class that takes no arguments"),
        ("run --mesh 1 --comm bench.stand_ins:NoGather", "which is no AllGather"),
        (
            "plan --mesh 2 --model fullshard_bench.models.gpt:gpt",
            "must take a fullshard_bench.Shape",
        ),
        ("run --mesh 1 --impl torch torch", "without repetition"),
        ("run --mesh 1 --device cuda", "no GPU"),
        ("run --mesh 1 --steps 0", "at least 1"),
        ("run --mesh 1 --reshard sometimes", "default, always, never"),
        ("run --mesh 2 --network fast", "1gbit"),
        ("run --mesh 4 --ranks-per-host 2", "with --network"),
        ("run --mesh 4 --ranks-per-host 0", "at least 1"),
        ("run --wide 8 --trace trace.json", "give --mesh"),
        ("run --mesh 1 --wide-group fake", "give --wide"),
        ("run --wide 8 --wide-group fake --device cuda", "--wide-group silent"),
        ("run --wide 8 --wide-group fake", "leave ddp out"),
        ("run --wide 8 --wide-group gloo", "invalid choice"),
        ("run --mesh 1 --impl none --trace trace.json", "add it to --impl"),
        ("run --mesh 1 --trace nowhere/trace.json", "no folder"),
        ("run --mesh 1 --speed 3", "--speed"),
        ("run --mesh 1 --setps 3", "did you mean --steps?"),
        ("rnu --mesh 1", "did you mean run?"),
        ("suite tpu", "invalid choice"),
        ("compare no.json no.json", "no.json"),
        ("draw no.json", "no.json"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fullshard_bench: error: ")
    assert said in line


@pytest.mark.matrix
def test_a_contestant_that_failed_is_reported_and_makes_the_exit_code_1(tmp_path: Path) -> None:
    impl = ("--impl", "fullshard", "bench.stand_ins:failing")
    words = ["run", "--mesh", "1", *_SMALL, *impl, "--no-exposed", "--out", f"{tmp_path}/result"]
    assert "out of luck" in run_python(*BENCH, *words, code=1)
    (point,) = read_result(tmp_path / "result.json").runs[0].points
    assert [entry.status for entry in point.entries] == ["ok", "failed"]


@pytest.mark.parametrize(
    "network", [(), pytest.param(("--network", "1gbit"), marks=pytest.mark.matrix)], ids=len
)
@pytest.mark.parametrize(
    ("stop", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.matrix)],
)
def test_a_signal_ends_the_ranks_and_removes_the_hosts(
    stop: signal.Signals, code: int, network: tuple[str, ...], tmp_path: Path
) -> None:
    if network and os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = ["run", "--mesh", "2", *_SMALL, *network, "--impl", "bench.stand_ins:waiting"]
    with subprocess.Popen(
        [sys.executable, "-m", "fullshard_bench", *words, "--out", f"{tmp_path}/result"],
        env=environment(FULLSHARD_TEST_PIPE=str(pipe)),
        start_new_session=True,
        # A shell ignores it in what it runs in the background, and children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as bench:
        ranks: set[int] = set()
        while len(ranks) < 2:
            with pipe.open() as told:
                ranks |= {int(line) for line in told}
        bench.send_signal(stop)
        assert bench.wait() == code
    assert [rank for rank in ranks if Path("/proc", str(rank)).exists()] == []
    if network:
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert f"fsb-{bench.pid}-" not in names


def test_a_rival_that_is_not_installed_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("torch.distributed.fsdp.fully_shard")
    assert main(["run", "--mesh", "1", "--impl", "torch"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "leave torch out" in line


@pytest.mark.matrix
def test_a_brief_suite_prints_a_line_for_each_bar_that_it_measures_and_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    impl = ("fullshard", "torch", "none")
    settings = Settings(
        model=TINY, tokens=2, steps=3, checked=2, threads=1, impl=impl, exposed=False
    )
    run = Run(name="gpt-mini, 32 tokens", settings=settings, meshes=("2",), brief=True)
    monkeypatch.setitem(SUITES, "quick", (run,))
    assert main(["suite", "quick", "--out", str(tmp_path / "result")]) == 0
    said = capsys.readouterr().out.splitlines()
    what = "bytes copied outside collectives, gpt-mini, 2 ranks"
    (line,) = [line for line in said if what in line]
    assert line.split()[0] in ("met", "not", "inconclusive") and line.endswith(", bar 0.15")
    assert sum(", bar " in line for line in said) == 1  # what was not measured has no line
    assert any(" met, in " in line for line in said)
    assert not any("x unsharded" in line for line in said)  # the tables are in the report
    assert "x unsharded" in (tmp_path / "result.md").read_text()


def test_every_measurement_of_the_quick_suite_is_about_a_bar() -> None:
    judged = {(bar.run, bar.kind, bar.mesh) for bar in BARS}
    for run in SUITES["quick"]:
        points = {("mesh", mesh) for mesh in run.meshes} | {("wide", str(n)) for n in run.wide}
        assert {(run.name, *point) for point in points} <= judged
