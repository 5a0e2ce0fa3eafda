"""Starts the ranks as torchrun does, without its traceback at the end of a stopped run.

Owns the last words of a run: rank 0 prints an error that the user can correct, or how to continue
    after Ctrl-C, as the last lines. Refuses any option of its own: torchrun's are passed on,
and SIGUSR1 to the ranks, which torchrun by itself would die of.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

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
    try:
        torchrun([*options, "-m", "fullshard_train", *arguments])
    except SignalException as error:
        return exit_code(error.sigval.value)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode not in _TOLD:
            raise
        return failure.exitcode
    return 0
