"""What a rank process does: joins the process group, then runs jobs until its pipe closes.

Called by ``support.pool.fork_server`` in each process that it forks. Jobs run in the main thread; a
second one reads the pipe, so that a rank stuck in a collective still ends with pytest.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
import warnings
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn, cast

import cloudpickle
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from support.pool.messages import Job, Outcome, Report, Settle, Start


def _start_reader(pipe: Connection) -> queue.SimpleQueue[Any]:
    """The queue of incoming messages; the process ends at once when the other end closes."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                message = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)
            inbox.put(message)

    threading.Thread(target=read, daemon=True, name="rank-inbox").start()
    return inbox


def _is_skip(error: BaseException) -> bool:
    pytest = sys.modules.get("pytest")
    return pytest is not None and isinstance(error, pytest.skip.Exception)


def _format(error: BaseException) -> str:
    """The traceback without this file's own frames at its top."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _run(job: Job) -> Report:
    random.seed(job.seed)
    torch.manual_seed(job.seed)
    try:
        with warnings.catch_warnings():
            cast(list[Any], warnings.filters)[:] = pickle.loads(job.warning_filters)
            fn, args, kwargs = pickle.loads(job.payload)
            result = fn(*args, **kwargs)
        return Report(outcome=Outcome.RETURNED, payload=cloudpickle.dumps(result))
    except BaseException as error:
        if _is_skip(error):
            return Report(outcome=Outcome.SKIPPED, text=str(error))
        return Report(outcome=Outcome.RAISED, text=_format(error))


class _ProcessState:
    """The process-wide settings a job may change, as they were before the first job."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.directory = os.getcwd()
        self.dtype = torch.get_default_dtype()
        self.modules = 0
        self._set_aside()

    def _set_aside(self) -> None:
        """Collect what nothing holds; what modules imported since made lives on: keep it out.

        Each collection would look through it all again, in torch's case for a tenth of a second.
        """
        gc.collect()
        if len(sys.modules) > self.modules:
            gc.freeze()
            self.modules = len(sys.modules)

    def restore(self) -> None:
        """Put every setting back, so that one job cannot change the next one's result."""
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.directory)
        torch.set_default_dtype(self.dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        # Meshes are equal whatever their process groups are, and DTensor remembers results by equal
        # meshes: the next job's tensors would be over this one's process groups.
        _clear_sharding_prop_cache()
        # A leaked autograd graph or module keeps its hooks; collect them before the next job.
        self._set_aside()


def serve(start: Start, pipe: Connection) -> NoReturn:
    """Join the process group and serve jobs, until the process ends with its pipe."""
    with open(start.stacks, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        inbox = _start_reader(pipe)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=start.store.as_uri(),
            rank=start.rank,
            world_size=start.world_size,
            timeout=datetime.timedelta(minutes=10),
        )
        dist.barrier()
        state = _ProcessState()
        pipe.send_bytes(pickle.dumps(Report(outcome=Outcome.READY)))
        while True:
            message = inbox.get()
            if isinstance(message, Settle):
                state.restore()
                dist.barrier()
                count = len(dist.distributed_c10d._world.pg_map)
                report = Report(outcome=Outcome.SETTLED, process_groups=count)
            else:
                report = _run(message)
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(pickle.dumps(report))
