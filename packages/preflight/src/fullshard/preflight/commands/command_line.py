"""``doctor``, ``plan``, ``verify`` and ``races`` from the command line.

``torchrun -m fullshard.preflight verify train.py`` compares a sharded model with the unsharded one;
without torchrun the command starts ranks by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.spi import CommandParser
from fullshard.preflight import __version__
from fullshard.preflight.commands.local_ranks import default_ranks, inside_ranks, start_ranks
from fullshard.preflight.commands.results import plan_value, races_value, verdict_value
from fullshard.preflight.commands.training import planned, raced
from fullshard.preflight.commands.user_program import ProgramError, accepted, load_program
from fullshard.preflight.costs.devices import DEVICES
from fullshard.preflight.doctor.command import run_doctor
from fullshard.preflight.pages.contents import plan_parts, races_parts, verdict_parts
from fullshard.preflight.pages.page import PageError, write_page
from fullshard.preflight.planning.failures import PlanError
from fullshard.preflight.sizes import parse_bytes
from fullshard.preflight.verification.verify import verify

__all__ = ["main"]

_PROGRAM = (
    "script.py or a module, with the functions build_model(), batch(step), loss(model, batch) and, "
    "if you have them, shard(model), optimizer(params) and tokens(batch); or with :function, which "
    "returns a dict of the arguments of fullshard.preflight.verify"
)
_CODES = "Exit code: 0, 1 if {finding}, 2 after a wrong argument."


def main(
    arguments: Sequence[str] | None = None,
    *,
    prog: str = "python -m fullshard.preflight",
    module: str = "fullshard.preflight",
) -> int:
    """Run the command on this rank; return 0 if all is well, 1 after a finding.

    Args:
        arguments: words of the command line; None: those of this process.
        prog: what the help calls the command.
        module: what ranks are started with, ``python -m module``.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = _parser(prog).parse_args(words)
    if given.command == "doctor":
        return run_doctor(given.folder, given.ranks, as_json=given.json)
    try:
        return _run(given, words, module)
    except (ProgramError, PageError) as error:
        return _refuse(str(error))


def _run(given: argparse.Namespace, words: list[str], module: str) -> int:
    program = load_program(given.program)
    if given.command == "plan":
        return _plan(given, program)
    if given.command == "races":
        report = raced(program, given.mesh, steps=given.steps)
        if given.html is not None:
            write_page(given.html, f"Races of {given.program}", races_parts(report))
        _say(races_value(report) if given.json else report, as_json=given.json)
        return 0 if report.ok else 1
    if not dist.is_initialized() and not inside_ranks():
        return start_ranks(module, words, given.ranks or default_ranks())
    return _verify(given, program)


def _parser(prog: str) -> CommandParser:
    parser = CommandParser(
        prog=prog,
        description="Checks before a run: of machines and connections, and of a sharded model.",
        version=__version__,
    )
    commands = parser.add_subparsers(required=True, dest="command")
    doctor = _command(
        commands,
        "doctor",
        "check versions, devices, limits, collectives and links",
        "Checks this machine and ranks started on it; under torchrun, all its ranks. "
        + _CODES.format(finding="a check failed (warnings do not count)"),
        ["doctor", "doctor --folder /path/to/checkpoints --json"],
    )
    doctor.add_argument("--folder", type=Path, help="also measure the disk of this folder")
    doctor.add_argument("--ranks", type=_count, help="ranks to start here (one per device, or 2-4)")
    plan = _command(
        commands,
        "plan",
        "the memory and time of a step in a world of any size",
        "Runs two steps of your program as one rank of a world that is not there, without data. "
        + _CODES.format(finding="no mesh fits the budget"),
        ["plan train.py --mesh 8 64", "plan train.py --mesh 8x64 --device h100 --budget 80GiB"],
    )
    plan.add_argument("program", help=_PROGRAM)
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
    check = _command(
        commands,
        "verify",
        "train both ways and compare",
        "Trains your model sharded on all ranks and unsharded on rank 0, and compares each tensor. "
        "Under torchrun on its ranks, else on ranks that it starts. "
        + _CODES.format(finding="they differ"),
        ["verify train.py", "verify train.py --ranks 4 --steps 5"],
    )
    check.add_argument("program", help=_PROGRAM)
    check.add_argument("--steps", type=_count, help="how many steps, instead of the program's (3)")
    check.add_argument("--stretch", type=float, help="a factor on what rounding may make differ")
    check.add_argument("--ranks", type=_count, help="ranks to start here (one per device, or 2)")
    races = _command(
        commands,
        "races",
        "missing waits between streams",
        "Trains your program on simulated streams and reports accesses that no event orders. "
        + _CODES.format(finding="there are races, or nothing was shown"),
        ["races train.py", "races train.py --mesh 2x2"],
    )
    races.add_argument("program", help=_PROGRAM)
    races.add_argument("--mesh", type=_mesh, default=(4,), metavar="N|MxN", help="ranks (4)")
    races.add_argument("--steps", type=_count, default=2, metavar="N", help="how many steps (2)")
    return parser


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
    if name != "doctor":
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


def _plan(given: argparse.Namespace, program: dict[str, Any]) -> int:
    plans = []
    for mesh in given.mesh:
        try:
            found = planned(program, mesh, given.micro_batches, given.device)
        except (PlanError, ValueError) as error:
            return _refuse(f"{given.program}: {error}")
        plans.append(found)
        if not given.json:
            fits = given.budget is None or found.fits(given.budget)
            over = "" if fits else f"\ndoes not fit {given.budget} bytes"
            _say(f"{found}{over}\n", as_json=False)
    if given.picture is not None:
        found.draw(given.picture, budget=given.budget)
    if given.html is not None:
        write_page(given.html, f"Plan of {given.program}", plan_parts(plans, given.budget))
    if given.json:
        _say([plan_value(each, given.budget) for each in plans], as_json=True)
    return 0 if given.budget is None or any(each.fits(given.budget) for each in plans) else 1


def _verify(given: argparse.Namespace, program: dict[str, Any]) -> int:
    wanted = {"steps": given.steps, "stretch": given.stretch}
    program = accepted(verify, program) | {k: v for k, v in wanted.items() if v is not None}
    began = not dist.is_initialized()
    if began:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
    try:
        verdict = verify(**program)
        if dist.get_rank() == 0:
            _say(verdict_value(verdict) if given.json else verdict, as_json=given.json)
            if given.html is not None:
                write_page(given.html, f"Verdict on {given.program}", verdict_parts(verdict))
    finally:
        if began:
            dist.destroy_process_group()
    return 0 if verdict.equal else 1


def _refuse(message: str) -> int:
    """Report an error of the user, and return the exit code for it."""
    sys.stderr.write(f"error: {message}\n")
    return 2


def _say(value: object, *, as_json: bool) -> None:
    sys.stdout.write(f"{json.dumps(value, indent=2) if as_json else value}\n")
    sys.stdout.flush()


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
