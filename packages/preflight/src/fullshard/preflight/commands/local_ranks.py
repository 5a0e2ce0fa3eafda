"""Ranks on this machine: how many, and starting a command on each of them as torchrun does."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "INTERRUPTED",
    "default_ranks",
    "exit_code_of",
    "inside_ranks",
    "interrupts_as",
    "joined_ranks",
    "share_cores",
    "start_ranks",
]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as of a shell."""

_SAID = frozenset({1, 2})
"""Exit codes of ranks that have printed the reason: a finding, or an error of the user."""

# A terminal sends Ctrl-C to the ranks, too: it ends a rank silently, also while it imports.
_RANK = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); del sys.argv[0]; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def inside_ranks() -> bool:
    """Return whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_ranks(without: int = 2) -> int:
    """Return the number of accelerators, or ``without`` if there is none."""
    return (torch.accelerator.device_count() if torch.accelerator.is_available() else 0) or without


@contextmanager
def joined_ranks(timeout: timedelta | None = None) -> Iterator[None]:
    """Provide a process group of the launcher's ranks, if there is no process group yet.

    Args:
        timeout: how long a collective of this process group waits; None: torch's default.
    """
    if dist.is_initialized():
        yield
        return
    if torch.accelerator.is_available():
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    dist.init_process_group(timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def interrupts_as(action: Any) -> Iterator[None]:
    """Let SIGINT (Ctrl-C) do ``action`` inside the ``with`` block; no effect outside of main."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def share_cores(ranks: int) -> None:
    """Give each rank its part of the cores, if ``OMP_NUM_THREADS`` is not set."""
    cores = os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // ranks, 1)))


def start_ranks(module: str, words: Sequence[str], ranks: int) -> int:
    """Run ``python -m module words`` on new ranks of this machine, and return the exit code."""
    # Imported here: the launcher brings modules that ranks do not need.
    from torch.distributed.run import get_args_parser, run

    share_cores(ranks)
    count = f"--nproc-per-node={ranks}"
    # By its address: a host whose name is not known can start ranks, too.
    options = ["--standalone", "--local-addr=127.0.0.1", count, "--no-python"]
    program = [sys.executable, "-c", _RANK, module, *words]
    given = get_args_parser().parse_args([*options, *program])
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(_is_news)
    try:
        return exit_code_of(lambda: run(given), reported=_SAID)
    finally:
        logger.removeFilter(_is_news)


def exit_code_of(launch: Callable[[], object], *, reported: Container[int] = ()) -> int:
    """Run a launcher, and return the exit code: of the first rank that failed, or 0.

    A rank or a launcher that a signal ended has 128 and the number of the signal, as in a shell.

    Args:
        launch: starts ranks and waits for them, as ``torch.distributed.run.run`` does.
        reported: exit codes of ranks that have printed the reason. After another code, the
            function prints the report of the launcher.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch()
    except SignalException as error:
        return 128 + int(error.sigval)
    except ChildFailedError as error:
        code = int(error.get_first_failure()[1].exitcode)
        if code not in reported:
            sys.stderr.write(f"{error}\n")
        return code if code >= 0 else 128 - code
    return 0


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for a line about a rank that has printed the reason, or that is stopped."""
    text = record.getMessage()
    if "Sending process" in text:  # to the ranks that wait for one that has ended
        return False
    return not any(f"failed (exitcode: {code})" in text for code in _SAID)
