"""The ranks of a measurement as processes of this host.

Owns starting them, listening to the first one, and ending them all when one fails or the user
stops. Each measurement has fresh processes: nothing of one is left in the next.
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
from pathlib import Path
from typing import IO

from fullshard_bench.errors import BenchError
from fullshard_bench.job import Job, JobResult
from fullshard_bench.meshes import parse_mesh
from fullshard_bench.network import Hosts
from fullshard_bench.records import from_table, to_table
from fullshard_bench.world import threads_of

__all__ = ["Tell", "run_job"]

Tell = Callable[[str, int, int], None]

_POLL = 0.05  # seconds between looks at the ranks


def run_job(job: Job, tell: Tell) -> JobResult:
    """What the job's ranks measured.

    Raises:
        BenchError: a rank gave up with one, or died.
    """
    ranks = 1 if job.kind == "wide" else parse_mesh(job.mesh).ranks
    with tempfile.TemporaryDirectory(prefix="fullshard-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(to_table(job)), encoding="utf-8")
        if job.settings.network and job.kind == "mesh" and ranks > 1:
            with Hosts(ranks, job.settings.network) as hosts:
                prefixes = [hosts.prefix(rank) for rank in range(ranks)]
                _run(folder, job, prefixes, hosts.environment, tell)
        else:
            _run(folder, job, [[] for _ in range(ranks)], {}, tell)
        table = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return from_table(JobResult, table)


def _run(
    folder: Path,
    job: Job,
    prefixes: Sequence[Sequence[str]],
    extra: dict[str, str],
    tell: Tell,
) -> None:
    environment = {**os.environ, **_environment(job), **extra}
    processes: list[subprocess.Popen[bytes]] = []
    logs = [folder / f"log-{rank}.txt" for rank in range(len(prefixes))]
    try:
        for rank, prefix in enumerate(prefixes):
            with logs[rank].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [
                            *prefix,
                            sys.executable,
                            "-m",
                            "fullshard_bench.worker",
                            str(folder),
                            str(rank),
                        ],
                        env=environment,
                        stdout=subprocess.PIPE if rank == 0 else log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C ends them through us, not beside us
                    )
                )
        pipe = processes[0].stdout
        assert pipe is not None
        listener = threading.Thread(target=_listen, args=(pipe, tell), daemon=True)
        listener.start()
        failed = _wait(processes)
        listener.join(timeout=5)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    if failed is not None:
        raise BenchError(_why(folder, logs, failed, processes[failed].returncode))


def _environment(job: Job) -> dict[str, str]:
    """What ranks need of this process: its path, since it may run uninstalled."""
    path = os.pathsep.join(filter(None, sys.path))
    threads = str(threads_of(job))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}


def _listen(pipe: IO[bytes], tell: Tell) -> None:
    """Passes on what the first rank tells; other lines are of the user's model, and shown."""
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


def _why(folder: Path, logs: Sequence[Path], rank: int, code: int) -> str:
    """One line: a rank's own, or the end of what it wrote before it died."""
    for path in sorted(folder.glob("error-*.txt")):
        return path.read_text(encoding="utf-8")
    lines = [line for line in logs[rank].read_text(errors="replace").splitlines() if line.strip()]
    sys.stderr.write("\n".join([*lines[-30:], ""]))
    last = lines[-1] if lines else "it wrote nothing"
    return f"rank {rank} of {len(logs)} ended with code {code}: {last}"
