"""Which ranks have ended, where a backend only says that a connection broke.

Owns: the record of this rank's process in the store of the default process group, written before
its first collective, and the look at the other records after an error. Refuses: ranks of other
hosts, of whose processes nothing is known.
"""

from __future__ import annotations

import json
import time
import weakref
from contextlib import suppress

import torch.distributed as dist

from fullshard.comm.runtime.compat import default_store
from fullshard.comm.runtime.process_watch import ProcessWatch, this_process

__all__ = ["ended_ranks", "record_process"]

_KEY = "fullshard/process/{}"
_PATIENCE = 1.0  # seconds: a process closes its connections before it has ended

_recorded: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def record_process() -> None:
    """Let other ranks find the process of this rank; once for each default process group."""
    world = dist.group.WORLD
    if world is not None and world not in _recorded:
        _recorded.add(world)
        with suppress(RuntimeError):  # a store that fails now fails the next collective, too
            default_store().set(_KEY.format(dist.get_rank()), json.dumps(this_process()))


def ended_ranks(process_group: dist.ProcessGroup) -> list[int]:
    """Return the ranks whose processes have ended, by their numbers in the default group.

    Waits up to a second for one to end. Ranks of other hosts are not found. If the store does not
    answer, the result is empty.
    """
    watch, end = ProcessWatch(), time.monotonic() + _PATIENCE
    processes = {}
    with suppress(RuntimeError):
        store = default_store()
        for rank in dist.get_process_group_ranks(process_group):
            if store.check([_KEY.format(rank)]):
                host, number = json.loads(store.get(_KEY.format(rank)))
                processes[rank] = (host, number)
    while True:
        ended = [rank for rank, process in processes.items() if watch.has_ended(process)]
        if ended or time.monotonic() > end:
            return ended
        time.sleep(0.01)
