"""The end of a process: gloo's threads finish what they hold while there is still an interpreter.

Owns: waiting for them, once, at exit, in processes that had a collective of ours. Refuses: waiting
for other ranks, which may never come.

[Note: threads that outlive Python] A gloo thread releases a collective's tensors after it has
notified the waiting threads. Releasing a tensor that Python knows takes the interpreter's lock. If
the interpreter is shutting down then, Python unwinds the thread, which C++ does not allow. A rank
that has finished its work then aborts with "terminate called without an active exception" (PyTorch
issue 190489). Destroying the process groups helps only where nothing else refers to them, and
DTensor's caches do. At exit, this thread therefore releases the lock repeatedly, until no gloo
thread has run between two releases: each gloo thread then waits for work or for a peer, and is not
stopped.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

__all__ = ["finish_threads_at_exit", "let_threads_finish"]

_THREADS = Path("/proc/self/task")  # of Linux; where there is none, nothing is waited for
_GLOO = "pt_gloo_runloop"  # what torch calls the threads that run gloo's collectives
_FIELDS = ("Name", "State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
_PAUSE = 0.001  # seconds: a waiting thread gets the interpreter's lock in this time
_PATIENCE = 30.0  # seconds


@functools.cache
def finish_threads_at_exit() -> None:
    """Call ``let_threads_finish`` when this process ends. Later calls do nothing, without a frame.

    The configurations of gathers and reductions call this function, and ``check_collective``.
    """
    atexit.register(let_threads_finish)


def let_threads_finish() -> None:
    """Wait until no thread of gloo's in this process runs any more; for at most 30 seconds."""
    deadline = time.monotonic() + _PATIENCE
    before = _gloo_threads()
    while before and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        now = _gloo_threads()
        if now == before and all(state.startswith("S") for _, state, *_ in now):
            return
        before = now


def _gloo_threads() -> list[tuple[str, ...]]:
    """Of each: its name, its state, and how often it has stopped running."""
    try:
        threads = [_fields(thread / "status") for thread in _THREADS.iterdir()]
    except OSError:
        return []
    return [fields for fields in threads if fields and fields[0] == _GLOO]


def _fields(status: Path) -> tuple[str, ...]:
    try:
        lines = status.read_text().splitlines()
    except OSError:  # the thread has ended
        return ()
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return tuple(found.get(name, "").strip() for name in _FIELDS)
