"""The program that forks rank processes: one that has imported torch, which takes seconds.

Started by ``support.pool.starting`` as ``python -P -m support.pool.fork_server``, one per rank
number: as when each was a process from scratch, ranks differ in how they hash strings and where
objects lie, so that an order that depends on these differs between ranks.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import NoReturn

# Imported for the ranks, which would import them at their first jobs.
import support.ranks  # noqa: F401
from support.pool.messages import Start
from support.pool.process import serve


def main() -> None:
    """Fork a rank for each `Start` that comes with two pipes, until the other end closes."""
    control = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a watcher
    gc.collect()
    gc.freeze()
    while True:
        try:
            start = control.recv()
            pipe, ended = (Connection(recv_handle(control)) for _ in range(2))
        except EOFError:
            return
        if os.fork() == 0:
            control.close()
            _watch(start, pipe, ended)
        pipe.close()
        ended.close()


def _watch(start: Start, pipe: Connection, ended: Connection) -> NoReturn:
    """Fork the rank and tell its exit code, which only its parent learns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _become_rank(start, pipe, ended)
    pipe.close()
    _, status = os.waitpid(pid, 0)
    try:
        ended.send(os.waitstatus_to_exitcode(status))
    finally:
        os._exit(0)  # also where pytest is gone, and nobody listens


def _become_rank(start: Start, pipe: Connection, ended: Connection) -> NoReturn:
    """Serve jobs as a process of its own: session, environment, output."""
    try:
        os.setsid()  # Ctrl-C reaches pytest only, and killing the rank's group takes its children
        nothing, log = os.open(os.devnull, os.O_RDONLY), os.open(start.log, os.O_WRONLY)
        for file, number in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(file, number)
        os.close(nothing)
        os.close(log)
        os.environ.clear()
        os.environ.update(start.environment)
        ended.send(os.getpid())
        ended.close()
        serve(start, pipe)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
