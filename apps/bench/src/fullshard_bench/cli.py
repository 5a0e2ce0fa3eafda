"""The command line: `run`, `suite`, `plan`, `plan-time`, `optim`, `state-dicts`, `compare`, ...

Owns the options, and how a command ends: with exit code 0, or 2 after an error that the user can
    correct, printed in one line; 1 if a contestant failed or was wrong; 128 and a signal's number.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from fullshard.comm.spi import CommandParser
from fullshard_bench import __version__
from fullshard_bench.errors import BenchError
from fullshard_bench.launching.world import inside_torchrun
from fullshard_bench.measuring.optimizers import measure_optimizers, said_of_optimizers
from fullshard_bench.measuring.state_dicts import measure_state_dicts, table_of_state_dicts
from fullshard_bench.measuring.state_files import (
    add_state_files,
    measure_state_files,
    state_files_of,
    table_of_state_files,
)
from fullshard_bench.models.registry import MODELS
from fullshard_bench.models.workload import Shape
from fullshard_bench.planning.choices import add_plan, choices_of
from fullshard_bench.planning.command import Planning, show_plans
from fullshard_bench.planning.files import Files
from fullshard_bench.planning.record import Recording
from fullshard_bench.planning.times import compare_times
from fullshard_bench.records.compact import compact_json
from fullshard_bench.records.result import Result, read_result
from fullshard_bench.reporting.compare import changes_as_json, compare
from fullshard_bench.reporting.page import check_page, write_result_page
from fullshard_bench.running.executing import Outputs, draw_record, execute
from fullshard_bench.running.run import Run
from fullshard_bench.running.suites import SUITES
from fullshard_bench.saving.memory_checkpoints import (
    add_memory_checkpoints,
    measure_memory_checkpoints,
    saves_of,
    table_of_memory_checkpoints,
)
from fullshard_bench.settings import CONTESTANTS, DTYPES, TRANSPORTS, WIDE_GROUPS, Settings

__all__ = ["main", "run"]

_EPILOG = """\
examples:
  %(prog)s suite quick
  %(prog)s run --mesh 2 --model gpt-mini --html result.html

Under torchrun, "run" measures in the ranks that are there. "suite cpu", "suite wide" and "suite
gpu" are what "nox -s bench" runs. Results are JSON files (--out; "compare" has --json). Exit codes:
0, 1 if a contestant failed or was wrong, 2 after a wrong argument, 128 and more after a signal.
"""

_DRAWN = """\
Draws time, memory and breakdown of the meshes, and the wide worlds, as far as the record has them.
A timeline or a trace cannot be drawn again: both need the events of the run, which a record does
not keep. Use --timeline, --trace and --html of "run" and "suite".
"""


class _Parser(CommandParser):
    """Reports a wrong argument as a `BenchError`."""

    def error(self, message: str) -> NoReturn:
        raise BenchError(f"{self.with_suggestion(message)}; see --help")


def main(arguments: Sequence[str] | None = None, *, prog: str = "fullshard_bench") -> int:
    """Run the benchmark, which help calls ``prog``.

    Returns:
        The exit code: 0; 1 if a contestant failed or was wrong; 2 after an error to put right; 130
        or 143 after SIGINT or SIGTERM.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_main = os.environ.get("RANK", "0") == "0"
    # A log file has no width of its own; a table should not be folded in it.
    width = None if sys.stdout.isatty() else 132
    console = Console(quiet=not is_main, width=width)
    try:
        options = _build_parser(prog).parse_args(words)
        if options.command == "compare":
            before, after = read_result(options.before), read_result(options.after)
            if options.json:
                print(changes_as_json(before, after))
            else:
                compare(before, after, console)
        elif options.command == "draw":
            if options.html is None:
                draw_record(options.record, options.out, console)
            else:
                write_result_page(read_result(options.record), options.html)
        elif options.command == "plan":
            show_plans(_planning(options), console)
        elif options.command == "plan-time":
            command = shlex.join(["python", "-m", "fullshard_bench", *words])
            rounds, recording = _at_least_one(options.rounds), Recording(command, options.out)
            compare_times(options.case, rounds, recording, console)
        elif options.command == "optim":
            ranks, rounds = _at_least_one(options.ranks, "ranks"), _at_least_one(options.rounds)
            measured = measure_optimizers(options.model, ranks, rounds)
            _show(measured, said_of_optimizers(measured), options.output, console)
        elif options.command == "state-dicts":
            ranks, rounds = _at_least_one(options.ranks, "ranks"), _at_least_one(options.rounds)
            console.print(table_of_state_dicts(measure_state_dicts(options.model, ranks, rounds)))
        elif options.command == "state-files":
            for name in ("ranks", "turns", "micro_batches", "tokens"):
                _at_least_one(getattr(options, name), name.replace("_", "-"))
            measured = measure_state_files(options.model, state_files_of(options))
            _show(measured, table_of_state_files(measured), options.output, console)
        elif options.command == "memory-checkpoints":
            _at_least_one(options.rounds)
            measured = measure_memory_checkpoints(options.model, saves_of(options))
            _show(measured, table_of_memory_checkpoints(measured), options.output, console)
        elif options.command == "suite":
            runs = SUITES[options.suite]
            if options.verify:
                runs = tuple(
                    replace(each, settings=replace(each.settings, verify=True)) for each in runs
                )
            return _code_of(execute(runs, _outputs(options), words, console))
        else:
            outputs = _outputs(options)
            drawn = outputs.html and options.mesh and "fullshard" in options.impl
            traced = bool(outputs.trace or outputs.timeline or drawn)
            return _code_of(execute([_run_of(options, traced)], outputs, words, console))
    except BenchError as error:
        if is_main:
            print(f"fullshard_bench: error: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130
    except _Terminated:
        return 143
    return 0


def _show(measured: dict[str, Any], table: str, output: Path | None, console: Console) -> None:
    """Print what was measured; keep it in a file, with the table beside it."""
    console.print(table, soft_wrap=True)
    if output is not None:
        output.write_text(compact_json(measured) + "\n")
        output.with_suffix(".md").write_text(table)


class _Terminated(BaseException):
    """SIGTERM came: what was started is to be ended first."""


def _terminate(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: ranks and hosts are removed now
    raise _Terminated


def _code_of(result: Result) -> int:
    entries = [each for run in result.runs for point in run.points for each in point.entries]
    return int(any(each.status in ("failed", "wrong") for each in entries))


def run(arguments: Sequence[str] | None = None, *, prog: str = "fullshard_bench") -> NoReturn:
    """Run `main` as a program, and leave with its exit code."""
    if not inside_torchrun():  # there torchrun ends ranks, which may wait where no handler runs
        signal.signal(signal.SIGTERM, _terminate)
    code = main(arguments, prog=prog)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to do, and threads of process groups may be slow to end


def _build_parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog,
        description="Measures fullshard against its rivals, on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        version=__version__,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser(
        "run",
        help="measure one model over meshes",
        epilog="example: %(prog)s --mesh 2 --html a.html",
    )
    _add_what(measure)
    _add_how(measure)
    _add_outputs(measure)
    suite = commands.add_parser("suite", help="run a set of measurements")
    suite.add_argument("suite", choices=list(SUITES))
    _add_verify(suite)
    _add_outputs(suite)
    planned = commands.add_parser("plan", help="the memory of a model on meshes that are not there")
    add_plan(planned)
    timed = commands.add_parser("plan-time", help="planned steps beside measured ones, here")
    timed.add_argument("--case", nargs="+", default=[], metavar="NAME", help="those alone")
    timed.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="of each case, with those in STEM (3)"
    )
    timed.add_argument("--out", type=Path, metavar="STEM", help="keeps rounds in STEM.json and .md")
    steps = commands.add_parser(
        "optim", help="steps of Muon, SOAP and 8-bit AdamW, beside what they are compared with"
    )
    steps.add_argument(
        "--model", nargs="+", default=["gpt-small", "gpt-mini"], help="models as `run` takes them"
    )
    steps.add_argument("--ranks", type=int, default=4, help="processes, with one thread each")
    steps.add_argument("--rounds", type=int, default=7, help="how often each step is timed")
    steps.add_argument("--output", type=Path, help="a JSON file, and the table beside it")
    states = commands.add_parser(
        "state-dicts", help="state_dict() and load_state_dict() beside torch's own"
    )
    states.add_argument("--model", nargs="+", default=["gpt-small"], help="as `run` takes them")
    states.add_argument("--ranks", type=int, default=2, help="processes, with one thread each")
    states.add_argument("--rounds", type=int, default=61, help="how often each call is timed")
    files = commands.add_parser(
        "state-files", help="AdamW with its state in files, beside its state in memory"
    )
    add_state_files(files)
    add_memory_checkpoints(
        commands.add_parser(
            "memory-checkpoints", help="checkpoints in memory beside asynchronous ones in files"
        )
    )
    changes = commands.add_parser("compare", help="what changed between two results")
    changes.add_argument("before", type=Path, help="a JSON file")
    changes.add_argument("after", type=Path, help="another")
    changes.add_argument("--json", action="store_true", help="print JSON")
    drawn = commands.add_parser("draw", help="draw the pictures of a record", epilog=_DRAWN)
    drawn.add_argument("record", type=Path, metavar="FILE.json", help="written by run or suite")
    drawn.add_argument(
        "--out", type=Path, metavar="STEM", help="write STEM_*.png (the record's own name)"
    )
    drawn.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that needs no network, alone"
    )
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.add_argument(
        "--mesh",
        nargs="+",
        default=[],
        metavar="N|MxN",
        help="ranks that shard, or MxN: replicated",
    )
    parser.add_argument(
        "--wide", nargs="+", type=int, default=[], metavar="N",
        help="one rank of a world of N that is not there: host cost, construction, memory",
    )  # fmt: skip
    parser.add_argument(
        "--wide-group", choices=WIDE_GROUPS, default=default.wide_group,
        help="its backend: silent returns at once; torch's fake copies gathers' inputs N times",
    )  # fmt: skip
    parser.add_argument(
        "--model", default=default.model,
        help=f"{', '.join(MODELS)}, with sizes as many:groups=4,width=8, or module:function",
    )  # fmt: skip
    parser.add_argument(
        "--impl", nargs="+", default=list(CONTESTANTS), metavar="NAME",
        help=f"contestants: {', '.join(CONTESTANTS)}, or module:function",
    )  # fmt: skip
    for name, text in (
        ("rows", "rows of a rank's batch"),
        ("tokens", "tokens of a row"),
        ("steps", "timed rounds"),
        ("checked", "steps before them, whose losses are checked"),
        ("seed", "of values and batches"),
    ):
        value = getattr(default, name)
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} ({value})")


def _at_least_one(number: int, name: str = "rounds") -> int:
    if number < 1:
        raise BenchError(f"--{name} {number}: must be at least 1")
    return number


def _planning(options: argparse.Namespace) -> Planning:
    for name in ("rows", "tokens", "jobs"):
        if getattr(options, name) < 1:
            raise BenchError(f"--{name} {getattr(options, name)}: must be at least 1")
    return Planning(
        model=options.model,
        shape=Shape(rows=options.rows, tokens=options.tokens),
        meshes=options.mesh,
        choices=choices_of(options),
        jobs=options.jobs,
        device=options.device,
        costs=options.costs,
        budget=options.budget,
        files=Files(stem=options.out, picture=options.picture, trace=options.trace),
    )


def _add_how(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default.device)
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype, help="of computing")
    parser.add_argument("--reduce-dtype", choices=DTYPES, default=default.reduce_dtype)
    parser.add_argument(
        "--clip", type=float, default=default.clip, help="largest gradient norm; 0: none (1)"
    )
    parser.add_argument("--offload", action="store_true", help="shards and optimizer on the CPU")
    parser.add_argument(
        "--reshard", default=default.reshard, metavar="WHEN", help="default, always, never or N"
    )
    parser.add_argument(
        "--prefetch", type=int, default=default.prefetch, metavar="N", help="units gathered ahead"
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--transport", choices=TRANSPORTS, default=default.transport)
    parser.add_argument(
        "--comm", default="", metavar="MODULE:CLASS", help="fullshard's all-gather, reduce-scatter"
    )
    parser.add_argument(
        "--no-exposed", dest="exposed", action="store_false",
        help="do not build twins whose collectives move nothing: half the memory",
    )  # fmt: skip
    _add_verify(parser)
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of each rank")
    parser.add_argument(
        "--network", default="", metavar="RATE", help="ranks as hosts with links of 1gbit, ..."
    )
    parser.add_argument(
        "--ranks-per-host", type=int, default=default.ranks_per_host, metavar="N",
        help="of --network: consecutive ranks that share a host (1)",
    )  # fmt: skip


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify", action="store_true",
        help="first compare each contestant with the unsharded model, tensor by tensor",
    )  # fmt: skip


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="STEM",
        help="write STEM.json and STEM.md (runs/bench-<date>-<time>/result)",
    )  # fmt: skip
    parser.add_argument(
        "--pictures", action="store_true",
        help="also draw STEM_*.png and show them in STEM.md; draw does it later, without STEM.md",
    )  # fmt: skip
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a step as a Chrome trace")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="a step as a picture")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="a page of the result that needs no network"
    )


def _run_of(options: argparse.Namespace, traced: bool) -> Run:
    names = Settings.__dataclass_fields__
    chosen = {name: value for name, value in vars(options).items() if name in names}
    chosen["impl"] = tuple(options.impl)
    return Run(
        name=options.model,
        settings=Settings(**chosen),
        meshes=tuple(options.mesh),
        wide=tuple(options.wide),
        trace=traced,
    )


def _outputs(options: argparse.Namespace) -> Outputs:
    stem = options.out
    if stem is None:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        stem = Path("runs", f"bench-{now}", "result")
    if stem.suffix in (".json", ".md", ".png"):
        stem = stem.with_suffix("")
    for path in (options.trace, options.timeline):
        if path is not None and not path.parent.is_dir():
            raise BenchError(f"{path}: there is no folder {path.parent}")
    if options.html is not None:
        check_page(options.html)
    return Outputs(
        stem=stem,
        trace=options.trace,
        timeline=options.timeline,
        html=options.html,
        pictures=options.pictures,
    )
