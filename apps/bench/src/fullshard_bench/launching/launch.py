"""The ranks of measurements as processes of this host.

Owns starting them, listening to the first of each measurement, and ending them all when one fails
or the user stops. A measurement has fresh processes: no state remains for the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fullshard_bench.errors import BenchError
from fullshard_bench.launching.job import Job, JobResult
from fullshard_bench.launching.network import Hosts
from fullshard_bench.launching.turns import ring
from fullshard_bench.launching.world import threads_of
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.records.conversion import from_table, to_table

__all__ = ["Tell", "run_jobs", "run_ranks"]

Tell = Callable[[str, int, int], None]

_POLL = 0.05  # seconds between looks at the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """A rank that is not started yet.

    Attributes:
        folder: the job's.
        rank: of the job.
        prefix: a command that takes the rank's command as its arguments.
        turn: arguments of its `RingTurn`, pipes first; empty if it takes no turns.
        module: the module that it runs.
    """

    folder: Path
    rank: int
    prefix: Sequence[str] = ()
    turn: tuple[int, ...] = ()
    module: str = "fullshard_bench.measuring.worker"

    @property
    def log(self) -> Path:
        """Return its output without the messages."""
        return self.folder / f"log-{self.rank}.txt"

    def start(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start it."""
        words = [str(self.folder), str(self.rank), *map(str, self.turn)]
        with self.log.open("wb") as log:
            return subprocess.Popen(
                [*self.prefix, sys.executable, "-m", self.module, *words],
                env=environment,
                stdout=subprocess.PIPE if self.rank == 0 else log,
                stderr=log,
                pass_fds=self.turn[:2],
                start_new_session=True,  # Ctrl-C ends the ranks through this process
            )


def run_jobs(jobs: Sequence[Job], tell: Tell) -> list[JobResult]:
    """Start ranks, and return their measurements.

    A single job has all its ranks. Several jobs have one rank each, and the ranks take turns.

    Raises:
        BenchError: a rank gave up with one, or died.
    """
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as name:
        folders = [_folder_of(job, Path(name, str(place))) for place, job in enumerate(jobs)]
        if len(jobs) > 1:
            with ring(len(jobs)) as turns:
                ranks = [
                    _Rank(folder=folder, rank=0, turn=(*pipes, place, len(jobs)))
                    for place, (folder, pipes) in enumerate(zip(folders, turns, strict=True))
                ]
                processes = _started(ranks, _environment(threads_of(jobs[0])))
            _watch(ranks, processes, tell)
        else:
            _run_job(jobs[0], folders[0], tell)
        tables = [json.loads((each / "result.json").read_text("utf-8")) for each in folders]
    return [from_table(JobResult, table) for table in tables]


def _folder_of(job: Job, folder: Path) -> Path:
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(to_table(job)), encoding="utf-8")
    return folder


def _run_job(job: Job, folder: Path, tell: Tell) -> None:
    count = 1 if job.kind == "wide" else parse_mesh(job.mesh).ranks
    environment = _environment(threads_of(job))
    if job.settings.network and job.kind == "mesh" and count > 1:
        per_host = job.settings.ranks_per_host
        with Hosts(count // per_host, job.settings.network) as hosts:
            ranks = [
                _Rank(folder=folder, rank=rank, prefix=hosts.prefix(rank // per_host))
                for rank in range(count)
            ]
            _watch(ranks, _started(ranks, {**environment, **hosts.environment}), tell)
        return
    ranks = [_Rank(folder=folder, rank=rank) for rank in range(count)]
    _watch(ranks, _started(ranks, environment), tell)


def run_ranks(module: str, folder: Path, count: int, *, threads: int, network: str = "") -> None:
    """Run a module as this many ranks, each with the folder and its number; waits for all.

    Args:
        module: whose process ends with 0, or writes `error-<rank>.txt` and ends with 2.
        folder: the folder has the job, and receives the results.
        count: how many.
        threads: of each one's operations.
        network: rate of the links between them as hosts; "" for ranks of this host.

    Raises:
        BenchError: a rank gave up with one, or died.
    """
    environment = _environment(threads)
    (folder / "store").unlink(missing_ok=True)
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(count, network)) if network and count > 1 else None
        ranks = [
            _Rank(
                folder=folder, rank=rank, module=module,
                prefix=() if hosts is None else hosts.prefix(rank),
            )
            for rank in range(count)
        ]  # fmt: skip
        extra = {} if hosts is None else hosts.environment
        _watch(ranks, _started(ranks, {**environment, **extra}), _tell_nobody)


def _tell_nobody(what: str, done: int, total: int) -> None:
    """Hears of progress, and is quiet."""


def _started(ranks: Sequence[_Rank], environment: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in ranks:
            processes.append(rank.start({**os.environ, **environment}))
    except BaseException:
        _end(processes)
        raise
    return processes


def _watch(
    ranks: Sequence[_Rank], processes: Sequence[subprocess.Popen[bytes]], tell: Tell
) -> None:
    """Return when all have ended well.

    Raises:
        BenchError: one has not; the others were ended.
    """
    try:
        listeners = [
            threading.Thread(target=_listen, args=(process.stdout, tell), daemon=True)
            for process in processes
            if process.stdout is not None
        ]
        for listener in listeners:
            listener.start()
        failed = _wait(processes)
        for process in processes:
            process.kill()  # who waits for one that failed would not end, nor would its listener
        for listener in listeners:
            listener.join(timeout=5)
    finally:
        _end(processes)
    if failed is not None:
        raise BenchError(_why(ranks[failed], len(ranks), processes[failed].returncode))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _environment(threads: int) -> dict[str, str]:
    """Return the variables of a rank: this process's path, since it may run uninstalled."""
    path = os.pathsep.join(filter(None, sys.path))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}


def _listen(pipe: IO[bytes], tell: Tell) -> None:
    """Pass on the messages of the first rank; other lines are of the user's model, and shown."""
    for line in pipe:
        try:
            told = json.loads(line)
            tell(told["what"], told["done"], told["of"])
        except (ValueError, KeyError, TypeError):
            sys.stderr.write(line.decode(errors="replace"))


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """The first rank seen to fail; None when all have ended well."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL)


def _why(rank: _Rank, count: int, code: int) -> str:
    """One line: a rank's own, or the end of what it wrote before it died."""
    for path in sorted(rank.folder.glob("error-*.txt")):
        return path.read_text(encoding="utf-8")
    text = rank.log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    sys.stderr.write("\n".join([*lines[-30:], ""]))
    last = lines[-1] if lines else "it wrote nothing"
    return f"rank {rank.rank} of {count} ended with code {code}: {last}"
