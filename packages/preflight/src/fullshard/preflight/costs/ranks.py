"""Local processes that measure together, as many as a mesh has ranks here, and the work of each.

Owns the start of the processes, their jobs and their answers. The processes meet through files,
like ranks of ``torchrun`` on one host, and leave no files.
"""

from __future__ import annotations

import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullshard.preflight.costs.call import Call
from fullshard.preflight.costs.collectives import Axis, Collective
from fullshard.preflight.costs.host import HostTime, time_host
from fullshard.preflight.costs.pages import Allocations, time_new_pages
from fullshard.preflight.costs.timing import Caches, Moved, time_call, time_collective

__all__ = ["Job", "Times", "main", "measure_together"]

_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(minutes=5)
_PROGRAM = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
# The C library keeps freed memory, so that no call pays for new pages: whether one does in a step
# depends on all that was freed before.
_KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Measurements that all ranks make at once.

    Attributes:
        ranks: how many.
        threads: of each one's operations.
        world: of how many ranks the engine's own time is measured as one.
        calls: operations.
        moves: collectives; the ranks are a multiple of each one's.
        parameters: of a group, for the host's time; 0 does not measure it.
        touched: bytes that an operation touches, for the host's time.
        share_cores: whether there are more threads than cores. Then the mean over calls counts:
            it has the time in which others had the core, which the median leaves out.
        allocations: of a step, for its new memory pages. Then the C library keeps freed memory as
            it does by default; else it keeps all.
    """

    ranks: int
    threads: int
    world: int
    calls: Sequence[Call] = ()
    moves: Sequence[Collective] = ()
    parameters: int = 0
    touched: int = 0
    share_cores: bool = False
    allocations: Allocations | None = None


@dataclass(frozen=True)
class Times:
    """Measured times over calls: of operations and the host the median over ranks.

    Attributes:
        calls: seconds of each operation; None of one that could not be called.
        moves: of each collective, the same on all ranks.
        host: the host's own time, if it was asked for.
        pages: seconds of a step for new memory pages, if they were asked for.
    """

    calls: Sequence[float | None]
    moves: Sequence[Moved]
    host: HostTime | None
    pages: float


def measure_together(job: Job) -> Times:
    """Start the ranks of a job, and return what they measured.

    Raises:
        RuntimeError: if a rank fails; the message has the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="fullshard-here-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(job))
        threads = str(job.threads)
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads}
        for unwanted in (*_OF_LAUNCHERS, *_KEEPING):
            environment.pop(unwanted, None)
        if job.allocations is None:
            environment |= _KEEPING
        with _started(folder, job.ranks, environment) as processes:
            _wait(processes, folder)
        found: Times = pickle.loads((folder / "times").read_bytes())
        return found


@contextmanager
def _started(
    folder: Path, count: int, environment: dict[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with (folder / f"log{rank}").open("wb") as log:
                words = [sys.executable, "-c", _PROGRAM, str(folder), str(rank)]
                processes.append(
                    subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
                )
        yield processes
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
            each.wait()


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Return when all have ended well; check each in turn, so that a failure is seen early.

    Raises:
        RuntimeError: if one has not.
    """
    running = dict(enumerate(processes))
    while running:
        for rank, process in tuple(running.items()):
            try:
                code = process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            del running[rank]
            if code:
                lines = (folder / f"log{rank}").read_text(errors="replace").splitlines()
                last = "\n".join(lines[-15:])
                raise RuntimeError(
                    f"rank {rank} of {len(processes)}, started to measure this machine, ended with "
                    f"code {code}; the end of what it wrote:\n{last}"
                )


def _measured(job: Job, folder: Path, rank: int) -> Times | None:
    """Run the work of one rank; the first returns what all found."""
    torch.set_num_threads(job.threads)
    host = time_host(job.parameters, job.touched, job.world) if job.parameters else None
    store = dist.FileStore(str(folder / "store"), job.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=_TIMEOUT)
    caches = Caches()
    middle = statistics.fmean if job.share_cores else statistics.median
    calls = [_call_seconds(each, caches, middle) for each in job.calls]
    groups = {axis: _group_of(axis, rank, job.ranks) for axis in {m.axis: None for m in job.moves}}
    moves = [time_collective(m.name, m.nbytes, groups[m.axis], caches) for m in job.moves]
    pages = 0.0 if job.allocations is None else time_new_pages(job.allocations)
    found: list[Times | None] = [None] * job.ranks
    dist.all_gather_object(found, Times(calls, moves, host, pages))
    dist.destroy_process_group()
    return _median([each for each in found if each is not None]) if rank == 0 else None


def _call_seconds(
    call: Call, caches: Caches, middle: Callable[[list[float]], float]
) -> float | None:
    dist.all_reduce(torch.zeros(1))  # all begin at once
    sys.stderr.write(f"timing {call}\n")  # the last words of a rank that an operation ends
    try:
        return time_call(call, caches, middle)
    except Exception:  # it wants other values than any that were made up
        traceback.print_exc()
        return None


def _group_of(axis: Axis, rank: int, ranks: int) -> dist.ProcessGroup:
    """Return this rank's process group for an axis; all ranks make all of them."""
    mine: dist.ProcessGroup | None = None
    block = axis.size * axis.stride
    for start in range(ranks):
        if start % block < axis.stride:
            members = list(range(start, start + block, axis.stride))
            made: Any = dist.new_group(members)
            mine = made if rank in members else mine
    assert mine is not None, "the axes divide the ranks"
    return mine


def _median(found: list[Times]) -> Times:
    calls = [
        None if None in column else statistics.median(column)
        for column in zip(*(each.calls for each in found), strict=True)
    ]
    hosts = [each.host for each in found if each.host is not None]
    host = None
    if hosts:
        host = HostTime(
            statistics.median(each.launch for each in hosts),
            statistics.median(each.unshard for each in hosts),
        )
    pages = statistics.median(each.pages for each in found)
    return Times(calls, found[0].moves, host, pages)


def main(folder: str, rank: str) -> None:
    """Is one rank: reads the job in a folder; the first writes what all measured."""
    job: Job = pickle.loads((Path(folder) / "job").read_bytes())
    found = _measured(job, Path(folder), int(rank))
    if found is not None:
        (Path(folder) / "times").write_bytes(pickle.dumps(found))
