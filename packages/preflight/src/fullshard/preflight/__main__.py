"""``verify`` and ``doctor`` from the command line.

``torchrun -m fullshard.preflight verify module:function`` compares a sharded model with the
unsharded one; ``python -m fullshard.preflight doctor`` checks machines and connections.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullshard.comm.spi import CommandParser
from fullshard.preflight import __version__
from fullshard.preflight.doctor.command import run_doctor
from fullshard.preflight.verification.verify import verify

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on this rank; return 0 if all is well, 1 if not."""
    parser = CommandParser(
        prog="python -m fullshard.preflight",
        description="Checks before a run: of machines and connections, and of a sharded model.",
        version=__version__,
    )
    commands = parser.add_subparsers(required=True, dest="command")
    doctor = commands.add_parser(
        "doctor",
        help="check versions, devices, limits, collectives and links",
        description="Checks this machine and ranks started on it; under torchrun, all its ranks. "
        "Exit code: 0 without a failure, 1 with one. Warnings do not count.",
    )
    doctor.add_argument("--folder", type=Path, help="also measure the disk of this folder")
    doctor.add_argument("--ranks", type=_count, help="ranks to start here (one per device, or 2-4)")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    command = commands.add_parser("verify", help="train both ways and compare")
    command.add_argument(
        "function",
        help="module:function, which returns a dict of the arguments of fullshard.preflight.verify",
    )
    command.add_argument("--steps", type=int, help="how many steps, instead of what it says")
    command.add_argument("--stretch", type=float, help="a factor on what rounding may make differ")
    given = parser.parse_args(arguments)
    if given.command == "doctor":
        return run_doctor(given.folder, given.ranks, as_json=given.json)
    wanted = {"steps": given.steps, "stretch": given.stretch}
    settings = {**_settings(given.function), **{k: v for k, v in wanted.items() if v is not None}}
    began = not dist.is_initialized()
    if began:
        dist.init_process_group()
    try:
        verdict = verify(**settings)
        if dist.get_rank() == 0:
            sys.stdout.write(f"{verdict}\n")
    finally:
        if began:
            dist.destroy_process_group()
    return 0 if verdict.equal else 1


def _count(text: str) -> int:
    """Return a number of ranks."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _settings(name: str) -> dict[str, Any]:
    """Return the result of the user's function."""
    module, colon, function = name.partition(":")
    if not colon or not function:
        raise SystemExit(f"{name!r} is no module:function; write for example train:verification")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"{name} cannot be imported: {error}") from error
    settings = found()
    if not isinstance(settings, dict):
        kind = type(settings).__name__
        raise SystemExit(f"{name} returned a {kind}; return a dict of the arguments of verify")
    return settings


if __name__ == "__main__":
    sys.exit(main())
