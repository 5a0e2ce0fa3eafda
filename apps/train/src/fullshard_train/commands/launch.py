"""Starts the ranks as torchrun does, without its traceback at the end of a stopped run.

Owns the last words of a run: rank 0 prints an error that the user can correct, or how to continue
after Ctrl-C, as the last lines. Reads words before it starts ranks, so that a mistyped option is
one line. Has no option of its own: torchrun's are passed on, and SIGUSR1 to the ranks, which
torchrun by itself would die of.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.run import get_args_parser, run

from fullshard_train.commands.parsers import COMMANDS, build_parser, explain
from fullshard_train.errors import TrainError
from fullshard_train.ranks.stopping import exit_code

__all__ = ["launch"]

_TOLD = frozenset({2, 130, 138, 143})
"""Exit codes of ranks that have said why: an error to put right, SIGINT, SIGUSR1, SIGTERM."""

_PASSED_ON = "--signals-to-handle"


def launch(words: Sequence[str]) -> int:
    """Start the ranks, wait for them, and return the exit code of the run.

    torchrun reports a rank that ends with any other exit code.

    Args:
        words: torchrun's options, then "--" and the trainer's arguments, if there are any.

    Raises:
        TrainError: an option of torchrun's or of the trainer's is wrong.
    """
    cut = words.index("--") if "--" in words else len(words)
    options, arguments = list(words[:cut]), words[cut + 1 :]
    if not any(word.replace("_", "-").startswith(_PASSED_ON) for word in options):
        # torchrun's own list, and the signal that SLURM's --signal=USR1@90 sends.
        options.insert(0, f"{_PASSED_ON}=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    # torchrun's store is shared by all rounds of ranks. Ranks of a second round would find
    # addresses of the first round, and a new host would wait for an address that no rank writes
    # again: seen with torch 2.13. Without, rank 0 of each round makes a store of its own.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    started = _parse([*options, "-m", "fullshard_train", *arguments])
    _check(arguments)
    logging.getLogger(_LOGGER).addFilter(_is_news)
    try:
        record(run)(started)
    except SignalException as error:
        return exit_code(error.sigval.value)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode not in _TOLD:
            raise
        return failure.exitcode
    return 0


def _parse(words: list[str]) -> argparse.Namespace:
    """Read torchrun's arguments; an error is one line in place of its usage."""
    parser = get_args_parser()

    def error(message: str) -> NoReturn:
        raise TrainError(f"launch: {explain(parser, message)}")

    parser.error = error  # type: ignore[method-assign]  # argparse's way: a subclass, not ours
    return parser.parse_args(words)


def _check(arguments: Sequence[str]) -> None:
    """Refuse arguments of the trainer that no rank could read, before any rank starts."""
    if not {"-h", "--help"} & set(arguments):
        command = arguments[0] if arguments and arguments[0] in COMMANDS else ""
        build_parser(command).parse_args(arguments[1:] if command else arguments)


_LOGGER = "torch.distributed.elastic.multiprocessing.api"


def _is_news(record: logging.LogRecord) -> bool:
    """False for a line about a rank that ended with one of `_TOLD`: the rank has said why."""
    told = record.getMessage()
    return not any(f"failed (exitcode: {code})" in told for code in _TOLD)
