"""The command ``fullshard``: which parser gets which words, help, and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fullshard.cli import __version__, main
from fullshard.cli.app import app
from fullshard.cli.running.recorded import file_of, recording
from fullshard.cli.running.runs import RunError, read_run
from support.ranks import distributed

COMMANDS = ["doctor", "plan", "verify", "races", "init", "run"]
COMMANDS += ["train", "bench", "compare", "convert", "memory"]


def _run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), prog_name="fullshard")


def test_help_lists_every_command_and_each_has_help_of_its_own() -> None:
    shown = _run("--help")
    assert shown.exit_code == 0
    assert re.findall(r"(?m)^│ (\w+)  ", shown.output) == COMMANDS
    assert {getattr(each.callback, "__name__", "") for each in app.registered_commands} == {
        *COMMANDS
    }


@pytest.mark.parametrize("command", ["doctor", "plan", "verify", "races", "run"])
def test_help_of_a_command_of_another_parser_calls_it_fullshard(command: str) -> None:
    shown = _run(command, "--help")
    assert shown.exit_code == 0
    assert shown.output.startswith(f"usage: fullshard {command} ")
    assert f"  fullshard {command} " in shown.output  # an example
    assert re.search(r"[Ee]xit\s+code", shown.output)
    assert "python -m fullshard" not in shown.output


@pytest.mark.parametrize("command", ["init", "compare", "convert", "memory"])
def test_help_of_a_command_has_an_example(command: str) -> None:
    shown = _run(command, "--help")
    assert shown.exit_code == 0
    assert f"Examples: fullshard {command} " in shown.output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_breaks_no_line_inside_a_paragraph(command: str) -> None:
    commands: Any = typer.main.get_command(app)
    for paragraph in commands.commands[command].help.split("\n\n"):
        assert "\n" not in paragraph  # typer would keep it, at the width of the source


@pytest.mark.parametrize("command", ["doctor", "plan", "verify", "races", *COMMANDS[-3:]])
def test_a_command_whose_result_is_a_value_prints_json(command: str) -> None:
    assert "--json" in _run(command, "--help").output


def test_version_names_torch_and_python() -> None:
    shown = _run("--version")
    assert shown.exit_code == 0
    assert re.match(rf"fullshard {re.escape(__version__)}, torch 2\..*, Python 3\.", shown.output)


def test_a_mistyped_command_or_option_is_answered_with_the_right_one() -> None:
    for words, said in (
        (["comapre"], "compare"),
        (["plan", "x.py", "--mehs", "2"], "--mesh"),
        (["run", "--nproc-pr-node=2", "x.py"], "--nproc-per-node"),
    ):
        ended = _run(*words)
        assert ended.exit_code == 2
        assert re.search(f"[Dd]id you mean '?{said}'?\\?", ended.output)


def test_help_loads_no_torch() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from fullshard.cli.app import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; print('torch' in sys.modules)"
    )
    path = f"import sys; sys.path[:0] = {sys.path!r}; "
    done = subprocess.run([sys.executable, "-c", path + program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("app_name", ["train", "bench"])
def test_an_app_gets_its_words_if_it_is_installed_and_is_named_if_not(
    app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[Any] = []

    def main(words: list[str], *, prog: str) -> None:
        got.append((words, prog))
        raise SystemExit(130)

    module = f"fullshard_{app_name}"
    monkeypatch.setitem(sys.modules, f"{module}.cli", types.SimpleNamespace(run=main))
    ended = _run(app_name, "--steps", "3", "--help", "-x")
    assert ended.exit_code == 130
    assert got == [(["--steps", "3", "--help", "-x"], f"fullshard {app_name}")]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = _run(app_name)
    assert ended.exit_code == 2
    said = f"error: fullshard-{app_name} is not installed; from a checkout: pip install ./packages/"
    assert said in ended.output
    assert ended.output.strip().endswith(f"./apps/{app_name}")


@pytest.mark.parametrize("module", ["fullshard_train", "fullshard_bench"])
def test_help_of_an_app_calls_it_by_the_words_that_were_typed(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = __import__(f"{module}.cli", fromlist=["main"]).main
    prog = module.replace("_", " ")
    try:
        assert main(["--help"], prog=prog) == 0
    except SystemExit as ended:
        assert ended.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {prog} ")
    assert f"  {prog} " in shown.partition("examples:")[2]
    assert re.search(r"[Ee]xit codes", shown)
    assert module not in shown


def test_a_script_that_is_not_there_is_refused_before_a_rank_starts() -> None:
    ended = _run("run", "none.py")
    assert ended.exit_code == 2
    assert "none.py does not exist; pass a script, or -m and a module" in ended.output


# -- runs -----------------------------------------------------------------------------------------


@distributed(2)
def test_a_rank_records_steps_events_and_memory_and_the_error_that_ended_it(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from fullshard.sharding import fully_shard

    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RuntimeError, match="on purpose"), recording(tmp_path):
            model = fully_shard(nn.Linear(8, 8))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
            for _ in range(5):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                other.step()
            if rank == 1:
                raise RuntimeError("on purpose")
            dist.barrier  # noqa: B018  # rank 0 goes on
            raise RuntimeError("on purpose")
    dist.barrier()
    told = json.loads(file_of(tmp_path, rank).read_text())
    assert (told["rank"], told["ranks"], told["steps"]) == (rank, 2, 5)
    assert len(told["step_seconds"]) == 4
    assert told["events"]["reduce_scatter"]["count"] == 5
    assert told["error"] == "RuntimeError: on purpose"
    assert told["peak_memory"] > 0
    assert told["own_times"]["steps"] == [2, 4, 6, 8, 10]  # two optimizers a step
    run = read_run(tmp_path)
    assert run.slow_ranks is not None
    assert (run.slow_ranks.ranks, len(run.slow_ranks.steps)) == ((0, 1), 5)
    assert [each.rank for each in run.ranks] == [0, 1]
    assert run.value()["errors"] == dict.fromkeys("01", "RuntimeError: on purpose")


def _rank_file(folder: Path, rank: int, seconds: float) -> None:
    folder.mkdir(exist_ok=True)
    told = {
        "rank": rank, "ranks": 2, "host": f"host{rank}", "device": "cpu", "torch": "2.13.0",
        "error": "", "seconds": 9.0, "steps": 5, "step_seconds": [9.0, 9.0, 9.0, seconds, seconds],
        "events": {"all_gather": {"count": 10, "bytes": 5 * 2**20}}, "peak_memory": 3 * 2**20,
    }  # fmt: skip
    file_of(folder, rank).write_text(json.dumps(told))


def test_runs_are_compared_and_of_one_run_each_rank_is_shown(tmp_path: Path) -> None:
    for rank in range(2):
        _rank_file(tmp_path / "a", rank, 0.010 * (rank + 1))
    (tmp_path / "b").mkdir()
    lines = [{"step": 1, "loss": 4.0}, {"kind": "held_out", "step": 1, "loss": 3.5}]
    lines += [{"kind": "checkpoint", "step": 1}, {"kind": "train", "step": 2, "loss": 3.0}]
    (tmp_path / "b/metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    a, b = json.loads(_run("compare", f"{tmp_path}/a", f"{tmp_path}/b", "--json").output)
    assert (a["ranks"], a["steps"], a["slowest_rank"]) == (2, 5, 1)
    assert a["step_seconds"] == pytest.approx(0.020)
    assert (a["gathered_bytes"], a["peak_memory"]) == (5 * 2**20, 3 * 2**20)
    assert (b["first_loss"], b["last_loss"], b["held_out_loss"]) == (4.0, 3.0, 3.5)
    assert (b["ranks"], b["steps"], b["peak_memory"]) == (0, 2, None)
    both = _run("compare", f"{tmp_path}/a", f"{tmp_path}/b")
    assert both.exit_code == 0
    assert "Ranks" not in both.output
    one = _run("compare", f"{tmp_path}/a").output
    assert re.search(r"1\s+│ host1 │\s+20\.0 │\s+2 │\s+1\.0 MiB", one)


def test_a_run_without_losses_or_gathers_is_shown_with_what_to_do(tmp_path: Path) -> None:
    for rank in range(2):
        _rank_file(tmp_path, rank, 0.010)
        file = file_of(tmp_path, rank)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"events": {}}))
    shown = _run("compare", str(tmp_path)).output
    assert f"for each step to {tmp_path}/metrics.jsonl" in shown
    assert "gathered a parameter: was a model sharded?" in shown


def test_a_page_of_records_is_refused_and_the_command_for_it_is_named() -> None:
    ended = _run("compare", "a.json", "b.json", "--html", "page.html")
    assert ended.exit_code == 2
    assert "use fullshard bench draw FILE.json --html FILE" in ended.output


def test_a_page_about_runs_has_losses_and_a_map_of_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        _rank_file(tmp_path / "a", rank, 0.010 * (rank + 1))
    for name in ("a", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        lines = (json.dumps({"step": step, "loss": 1 / step}) for step in (1, 2, 4))
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    ended = _run("compare", f"{tmp_path}/a", f"{tmp_path}/b", "--html", f"{tmp_path}/runs.html")
    assert ended.exit_code == 0
    text = (tmp_path / "runs.html").read_text()
    figures = [json.loads(each) for each in re.findall(r"data-figure=[^>]*>(.*?)</script>", text)]
    losses, heat, memory, moved = (each["data"] for each in figures)
    assert [(each["x"], each["y"]) for each in losses] == [([1, 2, 4], [1, 0.5, 0.25])] * 2
    assert [[round(time) for time in row] for row in heat[0]["z"]] == [
        [9000, 9000, 9000, 10, 10],
        [9000, 9000, 9000, 20, 20],
    ]
    assert memory[0]["y"] == [3, 3]
    assert moved[0]["y"] == [1, 1]


def test_a_slow_rank_of_a_run_is_named_in_text_json_and_maps(tmp_path: Path) -> None:
    for rank in range(2):
        _rank_file(tmp_path, rank, 0.01)
        path = file_of(tmp_path, rank)
        told = json.loads(path.read_text())
        forward = ["forward", "blocks.1", [20_000 * (rank + 1)] * 4]
        own = [forward, ["input", "", [5_000] * 4]]
        told["own_times"] = {"steps": [1, 2, 3, 4], "own": own, "waits": []}
        path.write_text(json.dumps(told))
    assert "rank 1 is slow in forward: 20.0 ms" in _run("compare", str(tmp_path)).output
    (value,) = json.loads(_run("compare", str(tmp_path), "--json").output)
    (slow,) = value["slow_ranks"]["slow"]
    assert (slow["rank"], slow["phase"], slow["module"]) == (1, "forward", "blocks.1")
    _run("compare", str(tmp_path), "--html", f"{tmp_path}/page.html")
    text = (tmp_path / "page.html").read_text()
    figures = [json.loads(each) for each in re.findall(r"data-figure=[^>]*>(.*?)</script>", text)]
    _, phases, steps, *_ = (each["data"][0] for each in figures)
    assert phases["x"] == ["input", "forward", "backward", "optimizer", "file system"]
    assert phases["z"] == [[5, 20, 0, 0, 0], [5, 40, 0, 0, 0]]
    assert (steps["x"], steps["z"]) == ([1, 2, 3, 4], [[25] * 4, [45] * 4])


def test_a_run_whose_rank_failed_ends_with_1(tmp_path: Path) -> None:
    _rank_file(tmp_path, 0, 0.01)
    path = file_of(tmp_path, 0)
    path.write_text(path.read_text().replace('"error": ""', '"error": "ValueError: no"'))
    ended = _run("compare", str(tmp_path))
    assert ended.exit_code == 1
    assert "ValueError: no" in ended.output


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has neither rank-\*\.json"):
        read_run(tmp_path)
    for text in ("no json", "null", '{"step": "first", "loss": 3}', '{"step": 1, "loss": [3]}'):
        (tmp_path / "metrics.jsonl").write_text(f"{text}\n")
        with pytest.raises(RunError, match=r"has a file that cannot be read \(\w+: "):
            read_run(tmp_path)
    assert _run("compare", str(tmp_path)).exit_code == 2


# -- convert --------------------------------------------------------------------------------------


def test_convert_lists_or_writes_and_says_what_it_left_out(tmp_path: Path) -> None:
    import torch

    state = {"model": {"w": torch.ones(2, 3)}, "optimizer": {"step": 3}}
    torch.save(state, tmp_path / "a.pt")
    listed = json.loads(_run("convert", f"{tmp_path}/a.pt", "--json").output)
    assert listed["tensors"] == {"w": {"dtype": "float32", "shape": [2, 3]}}
    assert listed["left_out"] == ["optimizer.step"]
    words = ["convert", f"{tmp_path}/a.pt", f"{tmp_path}/b.safetensors", "--dtype", "bfloat16"]
    done = _run(*words)
    assert done.exit_code == 0
    assert "b.safetensors: 1 tensors of" in done.output
    assert "as safetensors, read back and equal" in done.output
    assert "1 tensors, 24 B in the source" in done.output
    assert "left out: optimizer.step" in done.output
    again = _run(*words)
    assert again.exit_code == 2
    assert "exists; pass a folder or file that does not exist" in again.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "zip"], "--to zip: use one of dcp, safetensors, torch"),
        (["--dtype", "int4"], "--dtype int4: use one of float32"),
        (["--max-shard-size", "big"], "--max-shard-size 'big' is no size"),
        (["--max-shard-size", "0"], "--max-shard-size 0: use a size of at least one byte"),
    ],
)
def test_an_option_of_convert_that_means_nothing_is_refused(words: list[str], says: str) -> None:
    ended = _run("convert", "a", "b", *words)
    assert ended.exit_code == 2
    assert says in ended.output


def test_init_answers_from_options_and_asks_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = CliRunner().invoke(app, ["init", "--steps", "7"], input="\n\nbfloat16\n\n")
    assert asked.exit_code == 0
    assert "wrote train.py; next:" in asked.output
    assert "STEPS = 7" in Path("train.py").read_text()
    again = _run("init", "--yes")
    assert again.exit_code == 2
    assert "train.py exists; name another file" in again.output
    assert _run("init", "other.py", "--yes").exit_code == 0
    ended = _run("init", "third.py")  # its input ends at the first question
    assert ended.exit_code == 2
    assert "error: no answer; pass --yes" in ended.output


def test_init_prints_json_and_asks_on_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = json.loads(_run("init", "--json", "--yes", "--steps", "7").stdout)
    assert value["file"] == "train.py" and Path("train.py").exists()
    assert value["answers"]["precision"] == "float32" and value["answers"]["steps"] == 7
    assert value["next"][0] == "fullshard plan train.py --mesh 2 64"
    asked = CliRunner().invoke(app, ["init", "other.py", "--json"], input="\n\n\n\n\n")
    assert "Your model" in asked.stderr and "Your model" not in asked.stdout


def test_ctrl_c_at_a_question_of_init_ends_as_by_the_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*given: Any, **options: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[typer.prompt.__module__], "visible_prompt_func", interrupt)
    with pytest.raises(SystemExit) as ended:
        main(["init"])
    assert ended.value.code == 130
