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
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NoReturn, cast

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from support.chosen import chosen
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
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(job.seed)
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


def _are_deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _make_deterministic(both: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(both[0], warn_only=both[1])


def _signals() -> dict[int, Any]:
    return {each: signal.getsignal(each) for each in signal.valid_signals()}


def _set_signals(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _environ() -> dict[str, str]:
    return dict(os.environ)


def _set_environ(names: Mapping[str, str]) -> None:
    for name in os.environ.keys() - names.keys():
        del os.environ[name]
    os.environ.update(names)


def _set_dtensor_data(setter: object) -> None:
    if setter is None and "data" in vars(DTensor):
        del cast(Any, DTensor).data


# How to read and to write what a job may change. Torch does not tell whether it flushes denormals.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_environ, _set_environ),
    (os.getcwd, os.chdir),
    (_signals, _set_signals),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (lambda: vars(DTensor).get("data"), _set_dtensor_data),
    (torch.get_num_threads, torch.set_num_threads),
    (lambda: False, torch.set_flush_denormal),
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: None, torch.set_default_device),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_are_deterministic, _make_deterministic),
    (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # torch: a property of a module
        lambda fill: setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill),
    ),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    (
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
    ),
    (
        torch.__future__.get_overwrite_module_params_on_conversion,
        torch.__future__.set_overwrite_module_params_on_conversion,
    ),
)


class _ProcessState:
    """The process-wide settings a job may change, as they were before the first job."""

    def __init__(self) -> None:
        self.settings = [(write, read()) for read, write in _SETTINGS]
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
        torch.clear_autocast_cache()
        for write, before in self.settings:
            write(before)
        # Meshes are equal whatever their process groups are, and DTensor remembers results by equal
        # meshes: the next job's tensors would be over this one's process groups.
        _clear_sharding_prop_cache()
        # A leaked autograd graph or module keeps its hooks; collect them before the next job.
        self._set_aside()


def _backends() -> str:
    """Return the process group's backends; load the asynchronous device first, if it is chosen."""
    if not chosen():
        return "gloo"
    from support.card import BACKENDS  # which loads it

    return BACKENDS


def serve(start: Start, pipe: Connection) -> NoReturn:
    """Join the process group and serve jobs, until the process ends with its pipe."""
    faulthandler.enable()  # a crash writes the stack of each thread to the log of the rank
    with open(start.stacks, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        inbox = _start_reader(pipe)
        torch.set_num_threads(1)
        dist.init_process_group(
            _backends(),
            init_method=start.store.as_uri(),
            rank=start.rank,
            world_size=start.world_size,
            timeout=datetime.timedelta(seconds=start.timeout),
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
