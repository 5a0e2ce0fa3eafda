"""Whether other processes of this host have ended.

Owns: how a process is named to others, the kernel's descriptors by which it is watched (pidfd,
Linux), and the record of each rank's process in the store of the default process group, which is
read after an error. Refuses: processes of other hosts: of those nothing is known.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import select
import time
import weakref
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from fullshard.comm.runtime.compat import default_store

__all__ = ["ProcessWatch", "ended_ranks", "host_identity", "record_process", "this_process"]

_KEY = "fullshard/process/{}"
_PATIENCE = 1.0  # seconds: a process closes its connections before it has ended

_recorded: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def host_identity() -> str:
    """A text that is equal on two processes exactly if they can map each other's segments.

    Empty where no process can. Equal means: one kernel boot, one user, and shared process, network
    and user namespaces. A container with its own network counts as a host.
    """
    if not (hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "user")]
    except OSError:
        return ""
    return " ".join([boot, *namespaces, str(os.geteuid())])


def this_process() -> tuple[str, int]:
    """Host and number of this process."""
    return host_identity(), os.getpid()


class ProcessWatch:
    """Processes that were asked for, watched from then on."""

    def __init__(self) -> None:
        """Start without watched processes."""
        self._descriptors: dict[int, int | None] = {}
        self._poll = select.poll()
        weakref.finalize(self, _close, self._descriptors)

    def has_ended(self, process: tuple[str, int] | None) -> bool:
        """Whether a process is known to have ended; one of another host never is.

        Args:
            process: as ``this_process`` named it there; None: not known.
        """
        if process is None or not process[0] or process[0] != host_identity():
            return False
        number = process[1]
        if number not in self._descriptors:
            self._descriptors[number] = self._open(number)
        descriptor = self._descriptors[number]
        if descriptor is None:
            return False
        return descriptor == _GONE or any(fd == descriptor for fd, _ in self._poll.poll(0))

    def _open(self, number: int) -> int | None:
        """A descriptor that is readable once the process has ended; None where there is no such."""
        try:
            descriptor = os.pidfd_open(number)
        except AttributeError:  # not Linux
            return None
        except OSError as error:
            return _GONE if error.errno == errno.ESRCH else None
        self._poll.register(descriptor, select.POLLIN)
        return descriptor


_GONE = -1  # instead of a descriptor: it had ended before it was asked for


def _close(descriptors: dict[int, int | None]) -> None:
    for descriptor in descriptors.values():
        if descriptor is not None and descriptor != _GONE:
            os.close(descriptor)


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
