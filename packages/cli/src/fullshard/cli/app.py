"""The commands of ``fullshard``, with their help.

A command imports its modules inside its function, so ``--help`` and completion are quick.
"""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from fullshard.cli.delegating import run_app, run_preflight

__all__ = ["app", "main"]

# The words after these commands belong to the parser of another package, --help included.
_PASSED_ON: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

_EPILOG = """\
[b]From a script to a run[/b]

  fullshard plan train.py --mesh 8 64 --budget 80GiB

  fullshard verify train.py

  fullshard run --record runs/first train.py

  fullshard compare runs/first

[b]Exit codes[/b]

0: all is well. 1: a check found something. 2: a wrong argument, or an error in a checked script.
128 and more: ended by a signal.
[b]run[/b] and [b]train[/b] end as the first rank that failed.

[b]Results for other programs[/b]

Checks, comparisons, conversions and init print JSON with --json. A run leaves JSON in its folder
([b]run --record[/b], [b]train --out[/b]), and [b]bench[/b] in files (--out).
"""

app = typer.Typer(
    help="Fully sharded data parallel training for PyTorch: check, plan, verify, run, inspect.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and leave with its exit code."""
    app(args=None if arguments is None else list(arguments), prog_name="fullshard")
    raise SystemExit(0)


_Command = TypeVar("_Command", bound=Callable[..., None])


def _in_paragraphs(command: _Command) -> _Command:
    """Join the lines of each paragraph of the help, which typer shows as they are in the source."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    command.__doc__ = "\n\n".join(each.replace("\n", " ") for each in paragraphs)
    return command


def _version(wanted: bool) -> None:
    if not wanted:
        return
    import torch

    from fullshard.cli import __version__

    typer.echo(f"fullshard {__version__}, torch {torch.__version__}, {_python()}")
    raise typer.Exit


def _python() -> str:
    return f"Python {platform.python_version()}"


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print versions.")
    ] = False,
) -> None:
    pass


# -- before a run --------------------------------------------------------------------------------

_BEFORE = "Before a run"


@app.command(context_settings=_PASSED_ON, rich_help_panel=_BEFORE)
def doctor(context: typer.Context) -> None:
    """Check versions, devices, limits, collectives and links of this machine or of all ranks."""
    raise typer.Exit(run_preflight("doctor", context.args))


@app.command(context_settings=_PASSED_ON, rich_help_panel=_BEFORE)
def plan(context: typer.Context) -> None:
    """Compute the memory and the time of a step of your script, on any number of ranks."""
    raise typer.Exit(run_preflight("plan", context.args))


@app.command(context_settings=_PASSED_ON, rich_help_panel=_BEFORE)
def verify(context: typer.Context) -> None:
    """Train your model sharded and unsharded, and compare every tensor."""
    raise typer.Exit(run_preflight("verify", context.args))


@app.command(context_settings=_PASSED_ON, rich_help_panel=_BEFORE)
def races(context: typer.Context) -> None:
    """Find missing waits between streams, on simulated streams."""
    raise typer.Exit(run_preflight("races", context.args))


@app.command(rich_help_panel=_BEFORE)
@_in_paragraphs
def init(
    target: Annotated[
        Path | None, typer.Argument(help="The file to write (train.py, or train.toml).")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="script: your own loop; config: a file for fullshard train.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="module:function that returns your model; 'example' for a small one."),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="plenty, or tight: recompute activations.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the optimizer.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Take the defaults, ask nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; ask on standard error.")
    ] = False,
) -> None:
    """Write a commented training script or configuration, after five questions.

    Options answer questions; only the others are asked.

    Examples: fullshard init --yes, fullshard init --model mymodel:build --precision bfloat16
    """
    from fullshard.cli.starting.answers import AnswerError, ask
    from fullshard.cli.starting.writing import next_steps, write
    from fullshard.preflight.spi import json_text

    prompt = partial(_prompt, err=as_json)
    given = {"kind": kind, "model": model, "precision": precision, "memory": memory, "steps": steps}
    try:
        answers = ask(given, (lambda text, default: default) if yes else prompt)
        path = write(answers, target)
    except AnswerError as error:
        _refuse(str(error))
    except typer.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise typer.Exit(130) from error
        _refuse("no answer; pass --yes for the defaults, or options as answers")
    steps_after = next_steps(answers, path)
    if as_json:
        lines = [line.strip() for line in steps_after.splitlines()]
        typer.echo(json_text({"file": str(path), "answers": asdict(answers), "next": lines}))
    else:
        typer.echo(f"wrote {path}; next:\n{steps_after}")


def _prompt(text: str, default: str, *, err: bool) -> str:
    return str(typer.prompt(text, default=default, err=err))


# -- a run ---------------------------------------------------------------------------------------

_RUN = "A run"


@app.command(context_settings=_PASSED_ON, rich_help_panel=_RUN)
def run(context: typer.Context) -> None:
    """Run a script on several ranks, with fullshard in the place of torch's own FSDP."""
    from fullshard.cli.running.launch import run_script

    raise typer.Exit(run_script(context.args, "fullshard run"))


@app.command(context_settings=_PASSED_ON, rich_help_panel=_RUN)
def train(context: typer.Context) -> None:
    """Train a language model, an image classifier or a model of transformers (fullshard-train)."""
    run_app("fullshard_train", context.args, "fullshard train")


@app.command(context_settings=_PASSED_ON, rich_help_panel=_RUN)
def bench(context: typer.Context) -> None:
    """Measure fullshard against torch's own FSDP, on this machine (fullshard-bench)."""
    run_app("fullshard_bench", context.args, "fullshard bench")


# -- after a run ---------------------------------------------------------------------------------

_AFTER = "After a run"


@app.command(rich_help_panel=_AFTER)
@_in_paragraphs
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or two records of bench.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page that needs no network.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs in a table: steps, times, losses, memory; of one run, show each rank.

    A run is a folder of fullshard run --record, or any folder with a metrics.jsonl whose lines have
    step and loss, such as a run of fullshard train. Two JSON files are records of fullshard bench.

    Exit codes: 0; 1 if a rank of a run ended with an error; 2 if there is no run.

    Examples: fullshard compare runs/first, fullshard compare runs/a runs/b --html runs.html
    """
    if all(each.suffix == ".json" for each in runs):
        if html is not None:
            _refuse(
                "--html shows runs; use fullshard bench draw FILE.json --html FILE for a record"
            )
        words = [*map(str, runs), *(["--json"] if as_json else [])]
        run_app("fullshard_bench", ["compare", *words], "fullshard bench")
    from fullshard.cli.running.runs import RunError, read_run
    from fullshard.cli.running.tables import hints, ranks_table, runs_table
    from fullshard.preflight.spi import json_text

    try:
        found = [read_run(each) for each in runs]
    except RunError as error:
        _refuse(str(error))
    if html is not None:
        from fullshard.cli.running.pages import run_parts
        from fullshard.preflight.spi import PageError, write_page

        try:
            write_page(html, ", ".join(each.name for each in found), run_parts(found))
        except PageError as error:
            _refuse(str(error))
    values = [each.value() for each in found]
    if as_json:
        typer.echo(json_text(values))
    else:
        console = _console()
        console.print(runs_table(found))
        if len(found) == 1 and found[0].ranks:
            console.print(ranks_table(found[0]))
            if found[0].slow_ranks is not None:
                typer.echo(str(found[0].slow_ranks))
        for hint in hints(found):
            typer.echo(f"\n{hint}")
    raise typer.Exit(int(any(each["errors"] for each in values)))


@app.command(rich_help_panel=_AFTER)
@_in_paragraphs
def convert(
    source: Annotated[Path, typer.Argument(help="A folder or file of a checkpoint.")],
    target: Annotated[
        Path | None, typer.Argument(help="A new folder or file; without it, SOURCE is listed.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="dcp, safetensors or torch (by TARGET's suffix).")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The part of a nested state dict that is the model.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Floating-point tensors as float32, bfloat16, float16, float64."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one safetensors file.")] = "5GB",
    check: Annotated[bool, typer.Option(help="Read everything back and compare.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert the weights of a checkpoint, one tensor at a time, or list them.

    Reads torch.distributed.checkpoint (also FSDP1's sharded checkpoints), safetensors, files of
    torch.save (FSDP1's full checkpoints) and DeepSpeed ZeRO stages 1 to 3. Writes the first three.
    Optimizer state is not converted.

    Exit codes: 0; 2 if SOURCE cannot be read or TARGET cannot be written.

    Examples: fullshard convert checkpoint, fullshard convert checkpoint weights --dtype bfloat16,
    fullshard convert global_step100 model.safetensors, fullshard convert weights folder --to dcp
    """
    from fullshard.cli.converting.command import ConvertError, convert_or_list
    from fullshard.preflight.spi import json_text

    try:
        told = convert_or_list(
            source, target, to=to, key=key, dtype=dtype, max_shard_size=max_shard_size, check=check
        )
    except ConvertError as error:
        _refuse(str(error))
    if as_json:
        typer.echo(json_text(told.value()))
    else:
        told.show(_console())


@app.command(rich_help_panel=_AFTER)
@_in_paragraphs
def memory(
    remove: Annotated[
        list[str] | None, typer.Option(metavar="RUN", help="Remove the memory of this run.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="The folder of MemoryCheckpoints, if not in /dev/shm.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the checkpoints that runs have in the memory of this host, or remove them.

    Exit codes: 0; 2 if a run to remove is not there, or a process uses it.

    Examples: fullshard memory --json, fullshard memory --remove job-7
    """
    from fullshard.checkpoint import memory_runs
    from fullshard.cli.running.memory import memory_table, remove_runs
    from fullshard.preflight.spi import json_text

    try:
        remove_runs(memory_runs(folder), remove or [])
    except RuntimeError as error:
        _refuse(str(error))
    found = memory_runs(folder)
    if as_json:
        values = [{**vars(each), "folder": str(each.folder)} for each in found]
        typer.echo(json_text(values))
    else:
        _console().print(memory_table(found))


def _console() -> Console:
    # A log file has no width of its own; a table should not be folded in it.
    return Console(width=None if sys.stdout.isatty() else 132, highlight=False)


def _refuse(message: str) -> NoReturn:
    """Report an error of the user, and leave with 2."""
    sys.stderr.write(f"error: {message}\n")
    raise typer.Exit(2)
