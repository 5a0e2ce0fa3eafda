"""Rank processes as pytest starts, watches and ends them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from support.pool.messages import Start


class _ForkServer:
    """A process that has imported torch and forks the ranks of one number."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "support.pool.fork_server", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C reaches pytest only
        )
        theirs.close()

    def fork(self, start: Start, *pipes: Connection) -> None:
        """Order a rank; it gets the pipes, which are closed here."""
        self._control.send(start)
        for pipe in pipes:
            send_handle(self._control, pipe.fileno(), self._process.pid)
            pipe.close()

    def end(self) -> None:
        """End the server; its ranks end with their pipes."""
        self._control.close()
        self._process.kill()
        self._process.wait()


_servers: dict[int, _ForkServer] = {}


def end_servers() -> None:
    """End all fork servers; the next rank starts a new one."""
    while _servers:
        _, server = _servers.popitem()
        server.end()


class RankProcess:
    """One rank's process; ``pipe`` carries its jobs and reports."""

    def __init__(self, start: Start) -> None:
        if start.rank not in _servers:
            _servers[start.rank] = _ForkServer(start.environment)
        self.pipe, theirs = Pipe()
        self._ended, told = Pipe(duplex=False)
        _servers[start.rank].fork(start, theirs, told)

    @functools.cached_property
    def pid(self) -> int:
        """The process id, as soon as there is one. Raises EOFError if the fork server failed."""
        return int(self._ended.recv())

    @functools.cached_property
    def exit_code(self) -> int:
        """The exit code, negative for a signal, as soon as the process has ended."""
        assert self.pid
        return int(self._ended.recv())

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to a process that runs."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and all that it started; what is gone already stays so."""
        with contextlib.suppress(EOFError, ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait until the process has ended, and close the pipes to it."""
        with contextlib.suppress(EOFError):
            assert self.exit_code is not None
        self.pipe.close()
        self._ended.close()
