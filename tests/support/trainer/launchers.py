"""Jobs of several ranks that a test may kill: under torchrun, or forked from a warm process.

torchrun is what users start. A forked rank is a process like any other, but has torch imported
already, which is most of what a short job costs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Protocol, Self
from unittest import mock

from fullshard_train.cli import main
from fullshard_train.reporting.metrics import read_metrics
from support.python import environment
from support.trainer.jobs import losses

# What every rank of a job imports sooner or later: the trainer, and what torch and the curve of
# losses import at their first use.
PRELOADED = ["support.trainer.launchers", "torch._dynamo", "matplotlib.backends.backend_agg"]


class Job(Protocol):
    """A running job; its output goes to a file."""

    def ranks(self) -> list[int]:
        """The process ids of the ranks; empty as long as they have not started."""
        ...

    def running(self) -> bool: ...

    def terminate(self) -> None:
        """Sends SIGTERM as whoever manages the machine would."""
        ...

    def kill(self) -> None:
        """Kills every process of the job."""
        ...

    def wait(self, seconds: float) -> int:
        """The exit code: 0 if that of every process is. Raises TimeoutError."""
        ...


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class _Killed:
    """A job that is killed where a ``with`` block of it ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        raise NotImplementedError


class Launched(_Killed):
    """A job under a launcher that starts each rank in a session of its own.

    `program` comes before torchrun's options: by default ours, which ends with the code of a rank.
    """

    program: Sequence[str] = ("-m", "fullshard_train", "launch")
    between: Sequence[str] = ("--",)

    def __init__(
        self, ranks: int, arguments: Sequence[str], output: Path, options: Sequence[str] = ()
    ) -> None:
        self._ranks = ranks
        start = [*self.program, "--standalone", f"--nproc-per-node={ranks}", *options]
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *start, *self.between, *arguments],
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        found = _children(self._process.pid)
        return found if len(found) == self._ranks else []

    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Sends a signal to the launcher."""
        self._process.send_signal(number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        # The launcher first, so that it starts and stops nothing meanwhile.
        children = _children(self._process.pid)
        self._process.kill()
        for pid in {*children, *_children(self._process.pid)}:
            send(pid, signal.SIGKILL)
        self._process.wait()

    def wait(self, seconds: float) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the launcher still runs after {seconds} s") from error


class Torchrun(Launched):
    """A job under torchrun itself."""

    program = ("-m", "torch.distributed.run")
    between = ("-m", "fullshard_train")


class Forked(_Killed):
    """A job of ranks without a launcher, forked from a process that has imported the trainer."""

    def __init__(
        self,
        ranks: int,
        arguments: Sequence[str],
        output: Path,
        program: Callable[[list[str]], int] = main,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # The server finds modules by its environment alone, and would go on without them.
        with mock.patch.dict(os.environ, environment()):
            forkserver.ensure_running()
        port = str(free_port())
        self._processes = [
            context.Process(
                target=_rank,
                args=(program, list(arguments), rank, ranks, port, output),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()

    def ranks(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def running(self) -> bool:
        return any(process.is_alive() for process in self._processes)

    def terminate(self) -> None:
        for pid in self.ranks():
            send(pid, signal.SIGTERM)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def codes(self) -> list[int | None]:
        """The exit code of each rank."""
        return [process.exitcode for process in self._processes]

    def wait(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        if self.running():
            raise TimeoutError(f"ranks still run after {seconds} s")
        return next((code for code in self.codes() if code), 0)


def _rank(
    program: Callable[[list[str]], int],
    arguments: list[str],
    rank: int,
    size: int,
    port: str,
    output: Path,
) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    os.environ.update(world, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    sys.exit(program(arguments))


def _children(pid: int) -> list[int]:
    """The processes whose parent is `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which is in parentheses: state, parent, ...
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
    return sorted(found)


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run_forked(ranks: int, arguments: Sequence[str], output: Path) -> str:
    """Runs a job to its end, which has to be a good one; returns what it said."""
    with Forked(ranks, arguments, output) as job:
        assert job.wait(200) == 0, output.read_text()
    return output.read_text()


def until(metrics: Path, step: int, *jobs: Job) -> None:
    """Waits until the jobs, which have to run meanwhile, have recorded a step."""
    end = time.monotonic() + 120
    while not (metrics.exists() and max(losses(read_metrics(metrics)), default=0) >= step):
        assert all(job.running() for job in jobs) and time.monotonic() < end
        time.sleep(0.002)


Launcher = Callable[[int, Sequence[str], Path], Job]
