"""A request to stop, made by a signal: save first, then leave.

Owns SIGINT, SIGTERM and SIGUSR1 while a run lasts. The first one is only noted; the training loop
asks at each step, on all ranks together, so it does not matter which of them the signal reached. A
second one ends the process at once, even while it waits for a rank that is gone: a thread sees to
it, since Python's own handlers run only between two instructions of the main thread. Refuses to
know what is saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["ECHO_SECONDS", "StopRequest", "exit_code", "watch_signals"]

ECHO_SECONDS = 2.0
"""How long a repeated signal counts as the same request.

Whoever stops a whole job signals launcher and ranks alike, and the launcher passes it on.
"""

_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""SIGUSR1 is what SLURM is often told to send before the time is over: --signal=USR1@90."""


class StopRequest:
    """Whether this process was asked to stop, and by which signal.

    Args:
        clock: seconds, from any start.
        abort: ends the process with an exit code.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        abort: Callable[[int], object] = os._exit,
    ) -> None:
        self._clock = clock
        self._abort = abort
        self._number = 0
        self._since = 0.0

    @property
    def number(self) -> int:
        """The signal's number; 0 as long as there was none."""
        return self._number

    def receive(self, number: int) -> None:
        """Take a signal: the first is noted; a second signal that is not an echo aborts."""
        now = self._clock()
        if self._number == 0:
            self._number, self._since = number, now
        elif now - self._since > ECHO_SECONDS:
            self._abort(exit_code(number))


def exit_code(number: int) -> int:
    """The exit code of a process that a signal ended: 130 SIGINT, 143 SIGTERM, 138 SIGUSR1."""
    return 128 + number


@contextlib.contextmanager
def watch_signals(request: StopRequest) -> Iterator[None]:
    """Pass SIGINT, SIGTERM and SIGUSR1 to `request`; call it in the main thread.

    Earlier handlers are restored at the end.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    thread = threading.Thread(target=_pass_on, args=(reader, request), name="signals", daemon=True)
    thread.start()
    # The interpreter writes a signal's number to the descriptor the moment it arrives, if the
    # signal has a handler of Python's; what that handler then does is nothing.
    handlers = {number: signal.signal(number, lambda *_: None) for number in _WATCHED}
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.close()
        thread.join()
        reader.close()


def _pass_on(reader: socket.socket, request: StopRequest) -> None:
    while data := reader.recv(64):
        for number in data:
            if number in _WATCHED:
                request.receive(number)
