"""Threads as ranks for whole programs: ``torch.distributed`` with a default group in each thread.

Owns what ``fully_shard`` needs beyond a process group of threads, all of it private to torch, and
put back afterwards:

- torch's table of process groups, one per thread (``_install_threaded_pg``, and the isolation mode
  of its C++ half; 2.11, 2.13, 2.15). The backend's name must be torch's own, ``threaded``: a
  ``DeviceMesh`` then counts the thread as part of its identity, so that caches of DTensor do not
  mix up ranks.
- autograd runs backward in the thread that asked for it. On CPU it does so anyway; on an
  accelerator, one thread of the engine would run the backward of all ranks, each waiting for the
  others.

Shared all the same: the list of observers (an event says which rank it is of), the default dtype,
torch's random numbers (use ``ThreadRank.generator``), warning filters.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import multi_threaded_pg

from support.threads.group import ThreadGroup
from support.threads.ranks import ThreadRank, run_on_threads

P = ParamSpec("P")
T = TypeVar("T")

_here = threading.local()


def run_program_on_threads(
    fn: Callable[Concatenate[ThreadRank, P], T], world_size: int, *args: P.args, **kwargs: P.kwargs
) -> list[T]:
    """As ``run_on_threads``, with ``torch.distributed`` initialised on each rank.

    The default group is ``rank.group``'s equal: the same ranks, other collectives.
    """
    __tracebackhide__ = True

    def program(rank: ThreadRank, *args: Any, **kwargs: Any) -> T:
        _here.rank = rank
        dist.init_process_group("threaded", rank=rank.rank, world_size=world_size, store=store)
        with torch.autograd.set_multithreading_enabled(False):
            try:
                return fn(rank, *args, **kwargs)
            finally:
                dist.destroy_process_group()

    with _worlds_per_thread():
        store = dist.HashStore()
        return run_on_threads(program, world_size, *args, **kwargs)


@contextmanager
def _worlds_per_thread() -> Iterator[None]:
    isolate: Any = torch._C._distributed_c10d.__dict__["_set_thread_isolation_mode"]  # untyped
    plugin = dist.Backend._BackendPlugin(_make_group, True)
    # A CUDA build without a card replaces its device guard when DTensor first propagates a shape;
    # two threads that do so at once end the process with a segmentation fault.
    with FakeTensorMode():
        pass
    with ExitStack() as undo:
        undo.callback(setattr, sys, "excepthook", sys.excepthook)  # every rank puts its own on top
        undo.enter_context(patch.dict(dist.Backend._plugins, {"THREADED": plugin}))
        # 2.11 asks each table for its torchcomms when it is destroyed, and gave this one no list.
        comms = property(lambda world: [])
        undo.enter_context(
            patch.object(multi_threaded_pg.ThreadLocalWorld, "comms", comms, create=True)
        )
        multi_threaded_pg._install_threaded_pg()
        undo.callback(multi_threaded_pg._uninstall_threaded_pg)
        isolate(True)
        undo.callback(isolate, False)
        yield


def _make_group(options: Any, backend_options: object) -> ThreadGroup:
    """This thread's end of the group that torch is making: called on each of its ranks."""
    rank: ThreadRank = _here.rank
    ranks = tuple(options.global_ranks_in_group) or tuple(range(rank.world_size))
    return rank.world.group(ranks, rank.rank, options.group_id)
