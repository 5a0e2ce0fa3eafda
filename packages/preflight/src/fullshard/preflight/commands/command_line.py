"""``doctor``, ``plan``, ``verify`` and ``races`` from the command line.

``torchrun -m fullshard.preflight verify train.py`` compares a sharded model with the unsharded one;
without torchrun the command starts ranks by itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from fullshard.comm.spi import CommandParser
from fullshard.preflight import __version__
from fullshard.preflight.commands.local_ranks import (
    INTERRUPTED,
    default_ranks,
    inside_ranks,
    interrupts_as,
    joined_ranks,
    start_ranks,
)
from fullshard.preflight.commands.results import json_text, plan_value, races_value, verdict_value
from fullshard.preflight.commands.user_program import (
    ProgramError,
    accepted,
    load_program,
    planned,
    raced,
)
from fullshard.preflight.costs.devices import DEVICES
from fullshard.preflight.doctor.together import diagnose
from fullshard.preflight.pages.contents import plan_parts, races_parts, verdict_parts
from fullshard.preflight.pages.page import PageError, require_folder, require_page, write_page
from fullshard.preflight.planning.failures import PlanError
from fullshard.preflight.planning.report import Plan
from fullshard.preflight.verification.verify import verify
from fullshard.preflight.wording import parse_bytes

__all__ = ["main"]

_PROGRAM = (
    "script.py or a module, with the functions build_model(), batch(step), loss(model, batch) and, "
    "if you have them, shard(model), optimizer(params) and tokens(batch); or step(model, "
    "optimizers, batch) and optimizers(model) in place of loss and optimizer; or with :function, "
    "which returns a dict of the arguments of fullshard.preflight.verify"
)
_CODES = "Exit code: 0, 1 if {finding}, 2 after a wrong argument or an error of the program."
_MOST_CORES = 4  # with a rank of the doctor each, if there is no accelerator
_PATIENCE = timedelta(seconds=120)  # a rank that does not answer the doctor is a finding


@dataclass(frozen=True)
class _Output:
    """Where results are printed, as text or as JSON."""

    stream: TextIO
    as_json: bool

    def print(self, text: object, value: object) -> None:
        """Print ``text`` for a person, or ``value`` as JSON."""
        self.stream.write(f"{json_text(value) if self.as_json else text}\n")
        self.stream.flush()


def main(
    arguments: Sequence[str] | None = None,
    *,
    prog: str = "python -m fullshard.preflight",
    module: str = "fullshard.preflight",
) -> int:
    """Run the command on this rank, and return its exit code.

    0: all is well. 1: a finding. 2: an error. 130: stopped by Ctrl-C.

    Args:
        arguments: words of the command line; None: those of this process.
        prog: what the help calls the command.
        module: what ranks are started with, ``python -m module``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = _parser(prog).parse_args(words)
    # A rank ends at Ctrl-C at once, without a traceback: its launcher is stopped as well.
    action = signal.SIG_DFL if inside_ranks() else signal.getsignal(signal.SIGINT)
    try:
        with interrupts_as(action):
            return _checked_run(given, words, module)
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog} {given.command}: stopped\n")
        return INTERRUPTED


def _checked_run(given: argparse.Namespace, words: list[str], module: str) -> int:
    """Run the command, and turn its errors into an exit code."""
    if given.command == "doctor":
        return _doctor(given, words, module)
    output = _Output(sys.stdout, given.json)
    try:
        # With --json, stdout has the JSON alone: lines that the program prints go to stderr.
        with redirect_stdout(sys.stderr if given.json else sys.stdout):
            return _run(given, words, module, output)
    except (ProgramError, PageError) as error:
        return _refuse(str(error))
    except Exception:  # 1, Python's own code after a traceback, would mean a finding
        traceback.print_exc()
        return _refuse(f"{given.command} could not run {given.program} to its end; see above")


def _run(given: argparse.Namespace, words: list[str], module: str, output: _Output) -> int:
    if given.html is not None:
        require_page(given.html)
    if given.command == "plan" and given.picture is not None:
        require_folder(given.picture)
    program = load_program(given.program)
    if given.command == "plan":
        return _plan(given, program, output)
    if given.command == "races":
        report = raced(program, given.mesh, steps=given.steps)
        if given.html is not None:
            write_page(given.html, f"Races of {given.program}", races_parts(report))
        output.print(report, races_value(report))
        return 0 if report.ok else 1
    if _is_launcher():
        return start_ranks(module, words, given.ranks or default_ranks())
    return _verify(given, program, output)


def _parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Checks before a run: of machines and connections, and of a sharded model.",
        version=__version__,
    )
    commands = parser.add_subparsers(required=True, dest="command")
    for add in (_add_doctor, _add_plan, _add_verify, _add_races):
        add(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    doctor = _command(
        commands,
        "doctor",
        "check versions, devices, limits, collectives and links",
        "Checks this machine and ranks started on it; under torchrun, all its ranks (torchrun "
        "--nproc-per-node 8 -m fullshard.preflight doctor). "
        "Exit code: 0, 1 if a check failed (warnings do not count), 2 after a wrong argument.",
        ["doctor", "doctor --folder /path/to/checkpoints --json"],
    )
    doctor.add_argument("--folder", type=Path, help="also measure the disk of this folder")
    doctor.add_argument("--ranks", type=_count, help="ranks to start here (one per device, or 2-4)")


def _add_plan(commands: Any) -> None:
    plan = _program_command(
        commands,
        "plan",
        "the memory and time of a step in a world of any size",
        "Runs two steps of your program as one rank of a world that is not there, without data. "
        + _CODES.format(finding="no mesh fits the budget"),
        ["plan train.py --mesh 8 64", "plan train.py --mesh 8x64 --device h100 --budget 80GiB"],
    )
    plan.add_argument(
        "--mesh", nargs="+", type=_mesh, default=[(default_ranks(),)], metavar="N|MxN",
        help="ranks that shard, or replicas x ranks that shard (the ranks of this machine)",
    )  # fmt: skip
    plan.add_argument(
        "--device", choices=[*sorted(DEVICES), "cpu", "here"], metavar="NAME",
        help=f"{', '.join(sorted(DEVICES))}: with time; here: this machine, measured; cpu",
    )  # fmt: skip
    plan.add_argument("--budget", type=_size, metavar="80GiB", help="memory of one device")
    plan.add_argument("--micro-batches", type=_count, default=1, metavar="N", help="of a step (1)")
    plan.add_argument("--picture", type=Path, metavar="FILE", help="of the last mesh (matplotlib)")


def _add_verify(commands: Any) -> None:
    check = _program_command(
        commands,
        "verify",
        "train both ways and compare",
        "Trains your model sharded on all ranks and unsharded on rank 0, and compares each tensor. "
        "Under torchrun on its ranks, otherwise on ranks that it starts. "
        + _CODES.format(finding="they differ"),
        ["verify train.py", "verify train.py --ranks 4 --steps 5"],
    )
    check.add_argument("--steps", type=_count, help="how many steps, instead of the program's (3)")
    check.add_argument("--stretch", type=float, help="a factor on what rounding may make differ")
    check.add_argument("--ranks", type=_count, help="ranks to start here (one per device, or 2)")
    check.add_argument(
        "--aligned-seeds", action="store_true", default=None,
        help="seed the random numbers of each rank's batch alike in both runs, as dropout needs",
    )  # fmt: skip


def _add_races(commands: Any) -> None:
    races = _program_command(
        commands,
        "races",
        "missing waits between streams",
        "Trains your program on simulated streams and reports accesses that no event orders. "
        + _CODES.format(finding="there are races, or nothing was shown"),
        ["races train.py", "races train.py --mesh 2x2"],
    )
    races.add_argument("--mesh", type=_mesh, default=(4,), metavar="N|MxN", help="ranks (4)")
    races.add_argument("--steps", type=_count, default=2, metavar="N", help="how many steps (2)")


def _command(
    commands: Any, name: str, short: str, description: str, examples: Sequence[str]
) -> CommandParser:
    prog = commands._prog_prefix
    lines = "".join(f"  {prog} {each}\n" for each in examples)
    command: CommandParser = commands.add_parser(
        name,
        help=short,
        description=description,
        epilog=f"examples:\n{lines}",
        formatter_class=_Formatter,
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    return command


def _program_command(
    commands: Any, name: str, short: str, description: str, examples: Sequence[str]
) -> CommandParser:
    """Return a command that runs the user's program."""
    command = _command(commands, name, short, description, examples)
    command.add_argument("program", help=_PROGRAM)
    command.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page that needs no network (plotly)"
    )
    return command


class _Formatter(argparse.HelpFormatter):
    """Keeps the lines of examples, and fills those of descriptions."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return text
        return super()._fill_text(text, width, indent)


def _is_launcher() -> bool:
    """Return whether this process is no rank, so that it has to start ranks."""
    return not dist.is_initialized() and not inside_ranks()


def _doctor(given: argparse.Namespace, words: list[str], module: str) -> int:
    if _is_launcher():
        cores = min(max(os.cpu_count() or 1, 2), _MOST_CORES)
        return start_ranks(module, words, given.ranks or default_ranks(without=cores))
    with joined_ranks(_PATIENCE):
        diagnosis = diagnose(given.folder)
        if dist.get_rank() == 0:
            sys.stdout.write(f"{diagnosis.as_json() if given.json else diagnosis}\n")
            sys.stdout.flush()
    return 0 if diagnosis.healthy else 1


def _plan(given: argparse.Namespace, program: dict[str, Any], output: _Output) -> int:
    plans, wrong = list[Plan](), ""
    for mesh in given.mesh:
        try:
            found = planned(program, mesh, given.micro_batches, given.device)
        except (PlanError, ValueError) as error:
            wrong = f"{given.program}: {error}"
            break
        plans.append(found)
        if not given.json:
            fits = given.budget is None or found.fits(given.budget)
            over = "" if fits else f"\ndoes not fit {given.budget} bytes"
            output.print(f"{found}{over}\n", None)
    if plans:
        _show_plans(given, plans, output)
    if wrong:
        return _refuse(wrong)
    return 0 if given.budget is None or any(each.fits(given.budget) for each in plans) else 1


def _show_plans(given: argparse.Namespace, plans: Sequence[Plan], output: _Output) -> None:
    """Write the picture, the page and the JSON of plans, also if that of a later mesh failed."""
    if given.picture is not None:
        try:
            plans[-1].draw(given.picture, budget=given.budget)
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no matplotlib
            raise PageError(f"--picture {given.picture}: {error}") from error
    if given.html is not None:
        write_page(given.html, f"Plan of {given.program}", plan_parts(plans, given.budget))
    if given.json:
        output.print("", [plan_value(each, given.budget) for each in plans])


def _verify(given: argparse.Namespace, program: dict[str, Any], output: _Output) -> int:
    names = ("steps", "stretch", "aligned_seeds")
    wanted = {name: getattr(given, name) for name in names}
    program = accepted(verify, program) | {k: v for k, v in wanted.items() if v is not None}
    with joined_ranks():
        verdict = verify(**program)
        if dist.get_rank() == 0:
            output.print(verdict, verdict_value(verdict))
            if given.html is not None:
                write_page(given.html, f"Verdict on {given.program}", verdict_parts(verdict))
    return 0 if verdict.equal else 1


def _refuse(message: str) -> int:
    """Report an error of the user, and return the exit code for it."""
    sys.stderr.write(f"error: {message}\n")
    return 2


def _checked(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    """Return a number of bytes."""
    return int(_checked(parse_bytes, text))


def _count(text: str) -> int:
    """Return a number of ranks, steps or batches."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _mesh(text: str) -> tuple[int, ...]:
    """Return the sizes of a mesh."""
    sizes = text.split("x")
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; write 64, or 8x64")
    return tuple(_count(size) for size in sizes)
