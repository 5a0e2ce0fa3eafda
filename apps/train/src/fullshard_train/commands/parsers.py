"""The options of the command line, and their errors.

Owns names, help and what a value looks like. Refuses to act: see `fullshard_train.cli`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from fullshard_train.commands.plan import SHORT
from fullshard_train.commands.sample import add_options
from fullshard_train.errors import TrainError, did_you_mean

__all__ = ["COMMANDS", "build_parser", "explain", "read_patience"]

_EPILOG = """\
examples:
  %(prog)s --data corpus.txt --steps 200 --out runs/first
  %(prog)s launch --standalone --nproc-per-node=2 -- --resume latest --steps 400
  %(prog)s --config digits.toml --set optim.learning_rate=0.001 --check-config

Without a command, it trains, and leaves metrics.jsonl and result.json in the folder of the run;
"fullshard compare runs/first --html run.html" shows them as a page. Exit codes: 0, 2 after a wrong
argument, else that of the first rank that failed.
SIGINT, SIGTERM and SIGUSR1 save a checkpoint and end the run with exit code 130, 143 or 138; a
second one ends it at once.
"""

_LAUNCH_EPILOG = """\
example: %(prog)s --standalone --nproc-per-node=2 -- --steps 100.
The other options are those of torchrun: see "torchrun --help".
"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as a `TrainError`, so that it is shown once and not by each rank."""

    def error(self, message: str) -> NoReturn:
        raise TrainError(explain(self, message))


def explain(parser: argparse.ArgumentParser, message: str) -> str:
    """The error of a parser, with the option or the command that an unknown word is close to."""
    hint = "see --help"
    unknown = re.match(r"unrecognized arguments: ([^\s=]+)", message)
    if unknown and unknown[1] in COMMANDS:
        hint = f"a command must be the first word; {hint}"
    elif unknown:
        known = [*COMMANDS, *re.findall(r"--[a-z][a-z-]+", parser.format_help())]
        hint = f"{did_you_mean(unknown[1], known)} {hint}".lstrip()
    return f"{message}; {hint}"


def build_parser(command: str = "", prog: str = "fullshard_train") -> argparse.ArgumentParser:
    """The options of a command of ``prog``, or of a training run, which has no command."""
    if command in COMMANDS:
        told, add = COMMANDS[command]
        parser = _Parser(prog=f"{prog} {command}", description=f"{told}.", allow_abbrev=False)
        add(parser)
        return parser
    commands = "".join(f"  {name:<9} {told}\n" for name, (told, _) in COMMANDS.items())
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [OPTIONS]\n       {prog} COMMAND ...",
        description="Trains a small model with fully_shard, alone or under torchrun.\n\n"
        f"commands (COMMAND --help shows their options):\n{commands}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.add_argument("--version", action="store_true", help="print the version, and end")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training run."""
    _add_settings(parser)
    _add_checks(parser)
    _add_group(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose settings, and the state to continue from."""
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
    for option, setting in SHORT.items():
        parser.add_argument(
            f"--{option}",
            action="append",
            dest="set",
            type=f"{setting}={{}}".format,
            metavar="VALUE",
            help=f"short for --set {setting}=VALUE",
        )


def _add_checks(parser: argparse.ArgumentParser) -> None:
    """Add the options that check or plan a run before its first step."""
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="check all that can be known before training, print every setting and where it came"
        " from, and end: with 0, or 2 after an error; nothing is written",
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
        help="as --plan, and free parameters after forward or cut batches until a step fits; in"
        " bytes, kB, MB, GB, KiB, MiB or GiB",
    )


def _add_group(parser: argparse.ArgumentParser) -> None:
    """Add the options of the ranks that train together."""
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long a rank waits for the others before it gives up, and a launcher can start all"
        " again; longer than evaluations and checkpoints take (default: torch's, 30 minutes on"
        " CPUs, 10 on GPUs)",
    )
    parser.add_argument(
        "--elastic",
        metavar="ADDRESS",
        help="train as one replica group of a run whose groups may leave and join; the address is"
        " that which fullshard-lighthouse printed; needs fullshard-train[elastic]",
    )
    parser.add_argument(
        "--group", metavar="NAME", help="with --elastic: the name of this replica group"
    )


def _seconds(text: str) -> float:
    """A time from the command line.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: must be seconds, from 1 to 1000000")
    return seconds


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or a run's folder: its newest")
    parser.add_argument(
        "file",
        type=Path,
        help="where the weights go; a file that is not there, for the task hf a folder",
    )


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs; seeds are averaged")
    parser.add_argument(
        "--timed", type=Path, nargs="+", default=[], metavar="RUN",
        help="folders of short runs of the same optimizers on a quiet machine: their times count",
    )  # fmt: skip
    parser.add_argument("--no-times", action="store_true", help="compare at equal steps alone")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="STEM", help="STEM.json, .md and .png"
    )


def _add_launch(parser: argparse.ArgumentParser) -> None:
    """The arguments as `--help` shows them: torchrun's own parser reads them."""
    parser.usage = f"{parser.prog} [TORCHRUN'S OPTIONS] [-- ARGUMENTS OF THE TRAINER]"
    parser.epilog = _LAUNCH_EPILOG
    parser.add_argument("--standalone", action="store_true", help="all ranks are on this host")
    parser.add_argument("--nproc-per-node", metavar="N", help="the number of ranks of each host")
    parser.add_argument("--nnodes", metavar="N", help="the number of hosts")
    parser.add_argument("--rdzv-backend", metavar="c10d", help="how hosts find each other")
    parser.add_argument("--rdzv-endpoint", metavar="HOST:PORT", help="where hosts find each other")
    parser.add_argument("--max-restarts", metavar="N", help="how often ranks are started again")


COMMANDS: Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "launch": (
        "Starts ranks as torchrun does, and ends without its tracebacks if a rank has said why",
        _add_launch,
    ),
    "sample": (
        "Prints text from a checkpoint, in one process or sharded under torchrun",
        add_options,
    ),
    "export": ("Writes the full weights of a checkpoint as safetensors", _add_export),
    "compare": (
        "Puts held-out losses of several runs beside each other, at equal steps and equal time",
        _add_compare,
    ),
}
"""By name: what a command does, and what adds its options."""


def read_patience(parser: argparse.ArgumentParser, words: list[str]) -> timedelta | None:
    """What --timeout means; None too where the words are wrong, which rank 0 will tell of."""
    try:
        options, _ = parser.parse_known_args(words)
    except TrainError:
        return None
    return None if options.timeout is None else timedelta(seconds=options.timeout)
