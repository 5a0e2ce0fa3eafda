"""The command line: from arguments to a finished run.

Owns the order in which a run is put together, and how it ends: with exit code 0; with 2 after an
error to put right, told in one line by rank 0; with 128 + its number after a signal, when all ranks
have saved.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from fullshard_train.checkpoints.store import CheckpointStore
from fullshard_train.commands.export import export_checkpoint, export_model
from fullshard_train.commands.plan import SHORT, Plan, claim, make_plan
from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import (
    World,
    choose_device,
    highest_over_ranks,
    make_mesh,
    meet,
    on_main,
    start_world,
    stop_world,
)
from fullshard_train.ranks.stopping import StopRequest, exit_code, watch_signals
from fullshard_train.reporting.metrics import (
    JsonLines,
    MetricsSink,
    NoMetrics,
    SeveralSinks,
    TensorBoard,
)
from fullshard_train.reporting.progress import Progress
from fullshard_train.reporting.report import Result, write_report
from fullshard_train.tasks import load_task
from fullshard_train.training.trainer import Outputs, Trainer

__all__ = ["main", "run"]

_EPILOG = """\
SIGINT and SIGTERM save a checkpoint and end the run with exit code 130 or 143; a second one ends it
at once. "fullshard_train export CHECKPOINT FILE" writes a checkpoint's full weights as safetensors.
"fullshard_train compare RUN RUN --out STEM" puts held-out losses of runs beside each other.
"fullshard_train launch TORCHRUN'S OPTIONS -- ARGUMENTS" starts the ranks as torchrun does, and ends
without its tracebacks where a rank has said why.
"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as a `TrainError`, so that it is shown once and not by each rank."""

    def error(self, message: str) -> NoReturn:
        raise TrainError(f"{message}; see --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the trainer; returns this rank's exit code: 0, or 2 after an error to put right.

    After SIGINT or SIGTERM it is 130 or 143. Call it in the main thread.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_main = os.environ.get("RANK", "0") == "0"
    exporting = words[:1] == ["export"]
    parser = _build_export_parser() if exporting else _build_parser()
    if words[:1] == ["compare"]:
        parser = _build_compare_parser()
    if {"-h", "--help"} & set(words):
        if is_main:
            parser.print_help()
        return 0
    if exporting:
        return _export(parser, words[1:])
    if words[:1] == ["compare"]:
        return _compare(words[1:])
    if words[:1] == ["launch"]:
        # Imported here: ranks do not need it.
        from fullshard_train.commands.launch import launch

        return launch(words[1:])
    if not is_main:
        warnings.simplefilter("ignore")
    request = StopRequest()
    with watch_signals(request):
        world = start_world()
        try:
            code = _run_or_tell(parser, words, world, request)
            if code:
                # A launcher ends all ranks when the first one leaves: nobody leaves before the
                # lines are out.
                meet()
            return code
        finally:
            stop_world()


def run() -> NoReturn:
    """Runs `main` as a program, and leaves with its exit code."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing is left to do. A finished rank was seen to abort on the interpreter's own way out, now
    # and then: a thread of gloo, we believe, that asks for the interpreter's lock to let go of a
    # tensor when there is none to be had. So the way out is the short one.
    os._exit(code)


def _run_or_tell(
    parser: argparse.ArgumentParser, words: list[str], world: World, request: StopRequest
) -> int:
    try:
        return _run(parser, words, world, request)
    except TrainError as error:
        if world.is_main:
            _tell(error)
        return 2


def _tell(error: TrainError) -> None:
    print(f"fullshard_train: error: {error}", file=sys.stderr, flush=True)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fullshard_train",
        description="Trains a small model with fully_shard, alone or under torchrun.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a TOML file over the default config; may be repeated, the later one wins; digits.toml"
        " and hf.toml come with the package",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.NAME=VALUE",
        help="change one setting; may be repeated; the last one wins, --steps and such included",
    )
    parser.add_argument(
        "--resume",
        metavar="PATH",
        help="continue: a run folder, one checkpoint of it, latest (of --out, or of runs/), or auto"
        " (the newest of --out, a new run if there is none)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="before step 1, train three steps sharded and unsharded, and stop if they differ;"
        " takes room for the whole model on one rank",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="before step 1, print what memory a step will take; at the end, what it took",
    )
    parser.add_argument(
        "--budget",
        metavar="80GiB",
        help="as --plan, and free parameters after forward or cut batches until a step fits",
    )
    for option, setting in SHORT.items():
        parser.add_argument(
            f"--{option}",
            action="append",
            dest="set",
            type=f"{setting}={{}}".format,
            metavar="VALUE",
            help=f"short for --set {setting}=VALUE",
        )
    return parser


def _build_compare_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fullshard_train compare",
        description="Puts held-out losses of several runs beside each other, in one process: at "
        "equal steps, and at equal time, which is the time of the first run.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs; seeds are averaged")
    parser.add_argument(
        "--timed", type=Path, nargs="+", default=[], metavar="RUN",
        help="folders of short runs of the same optimizers on a quiet machine: their times count",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="STEM", help="STEM.json, .md and .png"
    )
    return parser


def _compare(words: list[str]) -> int:
    # Imported here: training does not need it.
    from fullshard_train.commands.compare import compare_runs, write_comparison

    try:
        options = _build_compare_parser().parse_args(words)
        print(write_comparison(compare_runs(options.runs, options.timed), options.out))
    except TrainError as error:
        _tell(error)
        return 2
    return 0


def _build_export_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fullshard_train export",
        description="Writes the full weights of a checkpoint as safetensors, in one process.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's folder: its newest")
    parser.add_argument(
        "file",
        type=Path,
        help="where the weights go; a file that is not there, for the task hf a folder",
    )
    return parser


def _export(parser: argparse.ArgumentParser, words: list[str]) -> int:
    try:
        options = parser.parse_args(words)
        checkpoint = export_checkpoint(options.checkpoint, options.file)
    except TrainError as error:
        _tell(error)
        return 2
    print(f"{options.file}: the weights of {checkpoint}, read back and equal")
    return 0


def _run(
    parser: argparse.ArgumentParser, words: list[str], world: World, request: StopRequest
) -> int:
    plan = on_main(lambda: make_plan(parser.parse_args(words)))
    config = plan.config
    device = choose_device(config, world)
    mesh = make_mesh(config, world, device)
    if config.train.deterministic and device.type == "cuda":
        _be_deterministic()
    task = load_task(config, world)
    if plan.position is not None and plan.position.fingerprint != task.fingerprint:
        raise TrainError(
            f"resume {plan.checkpoint}: it was trained on other data, or began with another model;"
            " give the same"
        )
    planned = None
    if plan.foresee:
        # Imported here: only this needs it.
        from fullshard_train.commands.planning import Watched, plan_run

        planned = on_main(
            lambda: plan_run(task, config, ranks=world.size, device=device, budget=plan.budget)
        )
        config = planned.config
        plan = replace(plan, config=config)
    verdict = None
    if plan.verify:
        # Imported here: only this needs it.
        from fullshard_train.training.verifying import require_verified

        verdict = require_verified(task, config, world=world, mesh=mesh, device=device)
    trainer = Trainer(config, world=world, mesh=mesh, device=device, task=task)
    if planned is not None:
        watched = Watched(device)
        trainer.around_update = watched.step
    if plan.checkpoint is not None and plan.position is not None:
        trainer.resume(plan.checkpoint, plan.position)
    on_main(lambda: claim(plan))
    if world.is_main:
        _introduce(plan, trainer)
        if verdict is not None:
            print(f"verified   {str(verdict).splitlines()[0]}", flush=True)
        if planned is not None:
            print(f"planned    {planned}", flush=True)
    number = _train(plan, trainer, request) or _report(plan, trainer, request)
    if planned is not None and world.is_main:
        print(watched.beside(planned.plan), flush=True)
    if number and world.is_main:
        print(_farewell(number, plan, trainer.step), flush=True)
    return exit_code(number) if number else 0


def _farewell(number: int, plan: Plan, step: int) -> str:
    name = signal.Signals(number).name
    if step == 0:
        return f"{name}: stopped before the first step; start it again, with --resume auto"
    checkpoint = CheckpointStore(plan.folder.checkpoints).path(step)
    folder = shlex.quote(str(plan.folder.root))
    return (
        f"{name}: saved after step {step} of {plan.config.train.steps}, in {checkpoint}\n"
        f"continue, started as before, with --resume {folder}"
    )


def _train(plan: Plan, trainer: Trainer, request: StopRequest) -> int:
    """Trains to the end, or to a signal, whose number it returns."""
    world, config = trainer.world, plan.config
    outputs = Outputs(
        store=CheckpointStore(plan.folder.checkpoints, keep=config.checkpoint.keep),
        metrics=_open_metrics(plan, trainer) if world.is_main else NoMetrics(),
        progress=Progress(
            total=config.train.steps, done=trainer.step, item=trainer.task.item, shown=world.is_main
        ),
    )
    try:
        return trainer.fit(outputs, request)
    finally:
        outputs.progress.close()
        outputs.metrics.close()


def _open_metrics(plan: Plan, trainer: Trainer) -> MetricsSink:
    lines = JsonLines(plan.folder.metrics)
    if plan.config.run.metrics == "jsonl":
        return lines
    return SeveralSinks([lines, TensorBoard(plan.folder.events, step=trainer.step)])


def _report(plan: Plan, trainer: Trainer, request: StopRequest) -> int:
    """Says how the finished run did; returns the number of a signal that came in between, or 0."""
    world, folder, task = trainer.world, plan.folder, trainer.task
    held_out = trainer.evaluate()
    sample = task.sample(trainer.model, trainer.device)
    (number,) = highest_over_ranks(request.number)
    if number:
        return number
    path = plan.export
    if path is not None:
        export_model(path, trainer.model, plan.config)
    if world.is_main:
        checkpoint = CheckpointStore(folder.checkpoints).latest() or plan.checkpoint
        assert checkpoint is not None  # training ends with one
        result = Result(
            task=task,
            held_out=held_out,
            baselines=task.baselines(),
            sample=sample,
            checkpoint=checkpoint,
            export=path,
            steps=trainer.step,
        )
        print(write_report(folder, result), flush=True)
    return 0


def _be_deterministic() -> None:
    """Makes CUDA repeat itself bit for bit; the CPU kernels in use here always do."""
    # What cuBLAS asks for; read when its handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # A debugging aid that comes with it and costs a write of every new buffer.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _introduce(plan: Plan, trainer: Trainer) -> None:
    world = trainer.world
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    lines = [
        f"model      {parameters:,} parameters, over {world.size} rank(s) on {trainer.device.type}",
        f"data       {trainer.task.data_is}",
        f"run        {plan.folder.root}",
    ]
    if plan.checkpoint is not None:
        lines.append(f"resumed    {plan.checkpoint}, after {trainer.step} steps")
    print("\n".join(lines), flush=True)
