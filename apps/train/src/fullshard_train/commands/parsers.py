"""The options of the command line, and their errors.

Owns names, help and what a value looks like. Refuses to act: see `fullshard_train.cli`.
"""

from __future__ import annotations

import argparse
import math
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from fullshard_train.commands.plan import SHORT
from fullshard_train.commands.sample import add_options
from fullshard_train.errors import TrainError

__all__ = ["PARSERS", "build_parser", "read_patience"]

_EPILOG = """\
SIGINT, SIGTERM and SIGUSR1 save a checkpoint and end the run with exit code 130, 143 or 138; a
second one ends it at once. "fullshard_train export CHECKPOINT FILE" writes a checkpoint's full
weights as safetensors, "fullshard_train sample CHECKPOINT" text from it.
"fullshard_train compare RUN RUN --out STEM" puts held-out losses of runs beside each other.
"fullshard_train launch TORCHRUN'S OPTIONS -- ARGUMENTS" starts the ranks as torchrun does, and ends
without its tracebacks where a rank has said why.
"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as a `TrainError`, so that it is shown once and not by each rank."""

    def error(self, message: str) -> NoReturn:
        raise TrainError(f"{message}; see --help")


def build_parser() -> argparse.ArgumentParser:
    """The options of a training run."""
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
        help="as --plan, and free parameters after forward or cut batches until a step fits",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help="how long a rank waits for the others before it gives up, and a launcher can start all"
        " again; longer than evaluations and checkpoints take (default: torch's, 30 minutes on"
        " CPUs, 10 on GPUs)",
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


def _build_sample_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fullshard_train sample",
        description="Prints text from a checkpoint, in one process or sharded under torchrun.",
        allow_abbrev=False,
    )
    add_options(parser)
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
    parser.add_argument("--no-times", action="store_true", help="compare at equal steps alone")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="STEM", help="STEM.json, .md and .png"
    )
    return parser


PARSERS = {
    "": build_parser,
    "export": _build_export_parser,
    "sample": _build_sample_parser,
    "compare": _build_compare_parser,
}
"""The parser of each command, by its name; training has none."""


def read_patience(parser: argparse.ArgumentParser, words: list[str]) -> timedelta | None:
    """What --timeout means; None too where the words are wrong, which rank 0 will tell of."""
    try:
        options, _ = parser.parse_known_args(words)
    except TrainError:
        return None
    return None if options.timeout is None else timedelta(seconds=options.timeout)
