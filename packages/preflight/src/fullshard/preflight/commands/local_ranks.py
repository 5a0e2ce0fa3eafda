"""Ranks on this machine: how many, and starting a command on each of them as torchrun does."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

__all__ = ["default_ranks", "inside_ranks", "share_cores", "start_ranks"]

_SAID = frozenset({1, 2})
"""Exit codes of ranks that have printed the reason: a finding, or an error of the user."""


def inside_ranks() -> bool:
    """Return whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_ranks() -> int:
    """Return the number of accelerators, or 2 without one."""
    return (torch.accelerator.device_count() if torch.accelerator.is_available() else 0) or 2


def share_cores(ranks: int) -> None:
    """Give each rank its part of the cores, if ``OMP_NUM_THREADS`` is not set."""
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // ranks, 1)))


def start_ranks(module: str, words: Sequence[str], ranks: int) -> int:
    """Run ``python -m module words`` on new ranks of this machine, and return the exit code.

    Raises:
        ChildFailedError: if a rank ended without printing a reason.
    """
    # Imported here: the launcher brings modules that ranks do not need.
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    share_cores(ranks)
    count = f"--nproc-per-node={ranks}"
    given = get_args_parser().parse_args(["--standalone", count, "-m", module, *words])
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(_is_news)
    try:
        run(given)
    except ChildFailedError as error:
        code = int(error.get_first_failure()[1].exitcode)
        if code not in _SAID:
            raise
        return code
    finally:
        logger.removeFilter(_is_news)
    return 0


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for a line about a rank that has printed the reason."""
    text = record.getMessage()
    return not any(f"failed (exitcode: {code})" in text for code in _SAID)
