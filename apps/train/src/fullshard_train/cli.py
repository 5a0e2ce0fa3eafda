"""The command line: from arguments to a finished run.

Owns the order in which a run is put together, and how it ends: with exit code 0; with 2 after an
    error that the user can correct, printed in one line by rank 0; with 128 + its number after a
    signal, when all ranks
have saved.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from fullshard_train.checkpoints.store import CheckpointStore
from fullshard_train.commands.check import check, origins
from fullshard_train.commands.export import export_checkpoint, export_model
from fullshard_train.commands.parsers import COMMANDS, build_parser, read_patience
from fullshard_train.commands.plan import Plan, claim, make_plan, resume
from fullshard_train.commands.sample import sample
from fullshard_train.errors import TrainError
from fullshard_train.ranks.distributed import (
    World,
    choose_device,
    highest_over_ranks,
    make_mesh,
    meet,
    on_main,
    raise_together,
    start_world,
    stop_world,
)
from fullshard_train.ranks.stopping import StopRequest, exit_code, watch_signals
from fullshard_train.reporting.loggers import LoggedRun, start_logger
from fullshard_train.reporting.metrics import (
    JsonLines,
    MetricsSink,
    NoMetrics,
    SeveralSinks,
    TensorBoard,
)
from fullshard_train.reporting.progress import Progress
from fullshard_train.reporting.report import Result, write_report
from fullshard_train.settings.config import Config
from fullshard_train.task import Task
from fullshard_train.tasks import load_task
from fullshard_train.training.determinism import be_deterministic, settings_put_back
from fullshard_train.training.trainer import Outputs, Trainer

__all__ = ["main", "run"]


def main(arguments: Sequence[str] | None = None, *, prog: str = "fullshard_train") -> int:
    """Run the trainer, which help calls ``prog``; return this rank's exit code.

    It is 0, or 2 after an error to put right. After SIGINT, SIGTERM or SIGUSR1 it is 130, 143 or
    138. Call it in the main thread.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_main = os.environ.get("RANK", "0") == "0"
    command = words[0] if words and words[0] in COMMANDS else ""
    parser = build_parser(command, prog)
    own = words[: words.index("--")] if command == "launch" and "--" in words else words
    if {"-h", "--help"} & set(own):
        if is_main:
            parser.print_help()
        return 0
    if own == ["--version"]:
        if is_main:
            print(f"fullshard-train {_version()}")
        return 0
    if command:
        return _HANDLERS[command](parser, words[1:])
    request = StopRequest()
    with settings_put_back(), watch_signals(request):
        if not is_main:
            warnings.simplefilter("ignore")
        world = start_world(read_patience(parser, words))
        try:
            code = _run_or_tell(parser, words, world, request)
            if code:
                # A launcher ends all ranks when the first one leaves: no rank leaves before the
                # lines are out.
                meet()
            return code
        finally:
            stop_world()


def _version() -> str:
    try:
        return version("fullshard-train")
    except PackageNotFoundError:
        return "(not installed: run from its sources)"


def run(arguments: Sequence[str] | None = None, *, prog: str = "fullshard_train") -> NoReturn:
    """Run `main` as a program, and leave with its exit code."""
    code = main(arguments, prog=prog)
    sys.stdout.flush()
    sys.stderr.flush()
    # No work remains. A finished rank was seen to abort on the interpreter's own way out, now
    # and then: a thread of gloo, we believe, that asks for the interpreter's lock to let go of a
    # tensor when there is none to be had. Exit the process directly.
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


def _launch(parser: argparse.ArgumentParser, words: list[str]) -> int:
    # Imported here: ranks do not need it.
    from fullshard_train.commands.launch import launch

    try:
        return launch(words)
    except TrainError as error:
        _tell(error)
        return 2


def _sample(parser: argparse.ArgumentParser, words: list[str]) -> int:
    world = start_world() if "RANK" in os.environ else None
    try:
        try:
            text = sample(parser, words, world)
        except TrainError as error:
            if world is None or world.is_main:
                _tell(error)
            if world is not None:
                meet()  # as in `main`
            return 2
    finally:
        stop_world()
    if text is not None:
        print(text, flush=True)
    return 0


def _compare(parser: argparse.ArgumentParser, words: list[str]) -> int:
    # Imported here: training does not need it.
    from fullshard_train.commands.compare import compare_runs, write_comparison

    try:
        options = parser.parse_args(words)
        found = compare_runs(options.runs, options.timed)
        print(write_comparison(found, options.out, times=not options.no_times))
    except TrainError as error:
        _tell(error)
        return 2
    return 0


def _export(parser: argparse.ArgumentParser, words: list[str]) -> int:
    try:
        options = parser.parse_args(words)
        checkpoint = export_checkpoint(options.checkpoint, options.file)
    except TrainError as error:
        _tell(error)
        return 2
    print(f"{options.file}: the weights of {checkpoint}, read back and equal")
    return 0


_HANDLERS = {"launch": _launch, "sample": _sample, "export": _export, "compare": _compare}


def _planned(options: argparse.Namespace) -> Plan:
    plan = make_plan(options)
    if options.check_config:
        return replace(plan, check=True, origins=origins(options, plan))
    return plan


def _run(
    parser: argparse.ArgumentParser, words: list[str], world: World, request: StopRequest
) -> int:
    plan = on_main(lambda: _planned(parser.parse_args(words)))
    if plan.check:
        found = check(plan, world)
        if world.is_main:
            print(found, flush=True)
        return 0
    config = plan.config
    device = choose_device(config, world)
    mesh = make_mesh(config, world, device)
    if config.train.deterministic and device.type == "cuda":
        be_deterministic()
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
    trainer = _trainer(plan, config, world, mesh, device, task)
    if planned is not None:
        watched = Watched(device)
        trainer.around_update.append(watched.step)
    if config.train.profile_steps:
        # Imported here: it takes a second, and only this needs it.
        from fullshard_train.training.profiling import Profiled

        profiled = Profiled(trainer, plan.folder.profile)
        trainer.around_update.append(profiled.around)
        trainer.at_end.append(profiled.end)
    in_memory = resume(plan, trainer)
    on_main(lambda: claim(plan, trainer.step))
    if world.is_main:
        _introduce(plan, trainer, in_memory=in_memory)
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


def _trainer(  # the arguments of a trainer, and which
    plan: Plan, config: Config, world: World, mesh: DeviceMesh, device: torch.device, task: Task
) -> Trainer:
    """The trainer of a run; of a replica group, if there are several."""
    if plan.elastic is None:
        return Trainer(config, world=world, mesh=mesh, device=device, task=task)
    # Imported here: only this needs it.
    from fullshard.elastic import ReplicaGroupError, ReplicaGroups
    from fullshard_train.training.elastic import ElasticTrainer

    logging.getLogger("fullshard.elastic").addHandler(_lines())
    logging.getLogger("fullshard.elastic").setLevel(logging.INFO)
    try:
        groups = ReplicaGroups(plan.elastic)
    except ReplicaGroupError as error:
        raise TrainError(f"--elastic: {error}") from None
    return ElasticTrainer(config, world=world, mesh=mesh, device=device, task=task, groups=groups)


def _lines() -> logging.Handler:
    """A handler that prints plain lines: who is in the quorum, and which steps were dropped."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


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
    """Train to the end, or to a signal, whose number it returns."""
    world, config = trainer.world, plan.config
    outputs = Outputs(
        store=CheckpointStore(plan.folder.checkpoints, keep=config.checkpoint.keep),
        metrics=raise_together(lambda: _open_metrics(plan, trainer)),
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
    """What rank 0 writes to, and others do not.

    Raises:
        TrainError: a file cannot be opened, or a logger of the user's raised.
    """
    if not trainer.world.is_main:
        return NoMetrics()
    run = plan.config.run
    try:
        sinks: list[MetricsSink] = [JsonLines(plan.folder.metrics)]
        if run.metrics == "tensorboard":
            sinks.append(TensorBoard(plan.folder.events, step=trainer.step))
    except OSError as error:
        raise TrainError(f"metrics {plan.folder.metrics}: {error.strerror or error}") from error
    if run.logger:
        told = LoggedRun(
            folder=plan.folder.root,
            config=plan.config.to_table(),
            step=trainer.step,
            ranks=trainer.world.size,
        )
        sinks.append(start_logger(run.logger, told, patience=run.logger_patience))
    return SeveralSinks(sinks)


def _report(plan: Plan, trainer: Trainer, request: StopRequest) -> int:
    """Print the result of the finished run; return the number of a late signal, or 0."""
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
            memory=trainer.measures.peaks,
            memory_is_of=trainer.measures.memory.is_of,
        )
        print(write_report(folder, result), flush=True)
    return 0


def _introduce(plan: Plan, trainer: Trainer, *, in_memory: bool) -> None:
    world = trainer.world
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    lines = [
        f"model      {parameters:,} parameters, over {world.size} rank(s) on {trainer.device.type}",
        f"data       {trainer.task.data_is}",
        f"run        {plan.folder.root}",
    ]
    if trainer.feedback_nbytes:
        lines.append(f"feedback   {trainer.feedback_nbytes / 1e6:.1f} MB of residuals on each rank")
    if isinstance(trainer.measures.utilisation, str):
        lines.append(f"no model FLOPs utilisation: {trainer.measures.utilisation}")
    if plan.checkpoint is not None or in_memory:
        source = "the memory of hosts" if in_memory else plan.checkpoint
        lines.append(f"resumed    {source}, after {trainer.step} steps")
    print("\n".join(lines), flush=True)
    if plan.rate_rises:
        print(f"warning    {plan.rate_rises}", flush=True)
