"""Runs a fault, and judges how each rank of the job ended, and what the job left behind."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.checkpoint import FileSystemReader

from fullshard.checkpoint import DamagedCheckpointError, check_checkpoint
from support.campaign.faults import KINDS, SAVED_AT, SAVING, SLOW_IN, Fault, Settings
from support.campaign.job import PLANTED, SCHEDULED, run_job
from support.elastic.faults import STAGES
from support.pool.messages import Outcome
from support.pool.ranks import RankPool, RanksFailed

__all__ = ["LIMIT", "MOUNTED", "Verdict", "judge", "lacking", "run_ranks"]

MOUNTED = ("small /dev/shm", "full disk")
"""Kinds that need a small disk, and ranks that are started anew, which takes seconds."""

_LOST = {"lost host": 1, "two neighbours lost": 2}
"""Kinds after which the memory of hosts is lost, and of how many hosts."""

TIMEOUT = 30.0
"""Seconds that a rank waits for another one; more than a rank is stopped for."""

LIMIT = 2 * TIMEOUT
"""Seconds within which each job has to end, on a busy machine too."""

Ending = Mapping[str, Any]

_WITH_MOUNT = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=16k tmpfs "$1" && shift && exec "$@"',
    "sh",
)

_starting = threading.Lock()  # two pools at once would share the pipes of those that start ranks


@dataclass
class Verdict:
    """What became of a fault.

    Attributes:
        fault: the fault.
        wrong: what should not have happened; empty if all is right.
        ended: how the job ended, in a word.
        seconds: how long the struck job took.
    """

    fault: Fault
    wrong: list[str] = field(default_factory=list)
    ended: str = ""
    seconds: float = 0.0


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Let ``count`` processes compute inside the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def run_ranks(fault: Fault, folder: Path, checkpoint: Path | None = None) -> dict[int, Ending]:
    """Return how each rank ended: what it wrote, or that it was killed, or hung."""
    for each in folder.glob("rank-*.json"):
        each.unlink()
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    reports: dict[int, Any] = {}
    job = (fault, folder, checkpoint or folder / "checkpoint")
    with _starting, mock.patch.dict(os.environ, TMPDIR=str(scratch)):
        pool = RankPool(fault.settings.ranks, grace=LIMIT, timeout=TIMEOUT)
    with pool, _busy(fault.busy):
        try:
            pool.run(run_job, job, {}, LIMIT)
        except RanksFailed as failed:
            reports = failed.reports
    endings: dict[int, Ending] = {}
    for rank in range(fault.settings.ranks):
        written = folder / f"rank-{rank}.json"
        if written.exists():
            endings[rank] = json.loads(written.read_text())
        elif rank in reports and reports[rank].outcome is Outcome.STUCK:
            endings[rank] = {"hung": reports[rank].text}
        else:
            endings[rank] = {"died": ""}
    return endings


@functools.cache
def _expected(settings: Settings, before: Settings | None = None) -> dict[int, Ending]:
    """Return how the job ends without a fault, after its first steps with settings ``before``.

    Then it goes on from files.
    """
    with tempfile.TemporaryDirectory(prefix="fullshard-campaign-") as folder:
        for each in (before, settings):
            if each is not None:
                endings = run_ranks(Fault(-1, "none", "", 0, 0, 0, 0.0, each), Path(folder))
    assert all("digest" in each for each in endings.values()), endings
    return endings


def _same(endings: Mapping[int, Ending], wanted: Mapping[int, Ending]) -> bool:
    """Tell whether the numbers are those of the job without a fault, from its first step on."""
    for rank, ending in endings.items():
        if "digest" not in ending:
            return False
        losses = wanted[rank]["losses"][ending["first"] - wanted[rank]["first"] :]
        if (ending["losses"], ending["digest"]) != (losses, wanted[rank]["digest"]):
            return False
    return True


def _is_clear(text: str, fault: Fault) -> bool:
    """Tell whether an error says what happened, or on which rank."""
    if fault.settings.checked:
        stage, tensor = STAGES[fault.place], re.escape(fault.tensor)
        return bool(re.search(rf"  {stage} of {tensor}, rank (\d+ and )?{fault.victim}\b", text))
    named = re.search(rf"\branks? (\d+, )*{fault.victim}\b", text)
    said = (PLANTED, "is damaged", "No space left")
    return bool(named) or any(each in text for each in said)


def _judge_errors(endings: Mapping[int, Ending], fault: Fault) -> Iterator[str]:
    """Yield what is wrong with a job that has to end, or did end, in errors."""
    for rank, ending in endings.items():
        if "hung" in ending:
            yield f"rank {rank} hung:\n{ending['hung']}"
        elif "digest" in ending:
            yield f"rank {rank} ended as if nothing had happened"
        elif "died" in ending:
            if rank != fault.victim or fault.kind not in (*_LOST, "kill", "exit"):
                yield f"rank {rank} died without an error"
        elif rank == fault.victim and not fault.settings.checked:
            continue  # its own error
        elif not _is_clear(ending["error"], fault):
            yield f"rank {rank} has an unclear error: {ending['error']}"


def _judge_leftovers(folder: Path) -> Iterator[str]:
    """Yield files that the jobs left: all but those that the checkpoint names."""
    scratch = folder / "scratch"
    left = [name for name in os.listdir(scratch) if not name.startswith("torchinductor")]  # torch's
    if left:
        yield f"files are left in the folder for temporary files: {left}"
    memory = [str(path) for path in folder.glob("memory/*/*")]
    if memory:
        yield f"the memory of hosts is left: {memory}"
    checkpoint = folder / "checkpoint"
    if (checkpoint / ".metadata").exists():
        try:
            check_checkpoint(checkpoint)
        except DamagedCheckpointError as error:
            yield str(error)
        stored = FileSystemReader(checkpoint).read_metadata().storage_data or {}
        named = {info.relative_path for info in stored.values()}
        strays = [name for name in os.listdir(checkpoint) if name not in named]
        strays = [name for name in strays if not name.startswith((".metadata", ".checksums"))]
        if strays:
            yield f"the checkpoint's folder has files that it does not name: {sorted(strays)}"


def _strike(fault: Fault, folder: Path) -> dict[int, Ending]:
    """Run the job with the fault, as its kind wants it."""
    if fault.kind == "corrupted checkpoint":
        run_ranks(fault.none(), folder)
        _flip_a_byte(folder / "checkpoint", random.Random(fault.seed))
        return run_ranks(fault.none(), folder)
    if fault.kind == "two jobs":
        (folder / "other").mkdir()
        other = replace(fault, seed=-1, settings=replace(fault.settings, micro_batches=3))
        with ThreadPoolExecutor() as pool:
            both = [
                pool.submit(run_ranks, fault, folder),
                pool.submit(run_ranks, other, folder / "other", folder / "checkpoint"),
            ]
            return both[0].result()
    if fault.kind == "small /dev/shm":
        return _with_small_disk(fault, folder, Path("/dev/shm"))
    if fault.kind == "full disk":
        (folder / "checkpoint").mkdir()
        return _with_small_disk(fault, folder, folder / "checkpoint")
    return run_ranks(fault, folder)


def lacking(kind: str) -> str:
    """Return what a kind needs that is not there; empty: nothing."""
    if kind == "slow rank" and not SCHEDULED.exists():
        return f"it needs {SCHEDULED}"
    if kind == "lost replica group" and find_spec("torchft") is None:
        return "replica groups need torchft"
    if kind not in MOUNTED:
        return ""
    try:  # root may mount something for its children alone, mostly
        done = subprocess.run([*_WITH_MOUNT, "/dev/shm", "true"], capture_output=True)
    except FileNotFoundError:
        return "a small disk needs unshare"
    return "a small disk needs root" if done.returncode else ""


def _with_small_disk(fault: Fault, folder: Path, path: Path) -> dict[int, Ending]:
    """Run the job with 16 KiB for files below ``path``."""
    given = folder / "fault.pickle"
    given.write_bytes(pickle.dumps(fault))
    command = [*_WITH_MOUNT, str(path), sys.executable, "-P", "-m", "support.campaign"]
    command += [str(given), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    endings = json.loads(given.with_suffix(".json").read_text())
    return {int(rank): ending for rank, ending in endings.items()}


def _flip_a_byte(folder: Path, generator: random.Random) -> None:
    """Change a bit of a byte of a file in the folder."""
    file = generator.choice(sorted(folder.iterdir()))
    data = bytearray(file.read_bytes())
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    file.write_bytes(data)


def _restart(fault: Fault, folder: Path) -> Iterator[str]:
    """Start the job again without the fault; yield what is wrong with it.

    After the loss of hosts it has as many ranks, one fewer, or one more. Its numbers are those of a
    job that went on from files with these ranks, after the same step.
    """
    ranks, hosts = fault.settings.ranks, fault.settings.hosts
    settings, before = fault.settings, None
    plain = replace(settings, hosts=())
    if hosts:
        for each in range(_LOST[fault.kind]):
            shutil.rmtree(folder / "memory" / str((fault.victim + each) % ranks))
        fewer = tuple(host for host in hosts if host != fault.victim)
        now = (fewer, hosts, (*hosts, ranks))[fault.seed % 3]
        settings = replace(settings, ranks=len(now), hosts=now)
    endings = run_ranks(replace(fault.none(), settings=settings), folder)
    first = max(each.get("first", 0) for each in endings.values())
    if hosts:
        sources = {each.get("source", "") for each in endings.values()}
        wanted = {"memory"} if fault.kind == "lost host" else {"files"}
        if fault.kind != "lost host" and fault.step <= SAVED_AT[1]:
            wanted = {"files"} if first else {"nowhere"}  # the first save may not be complete
        if sources != wanted or (fault.kind == "lost host" and first < fault.step - 1):
            yield f"the restart went on with step {first}, from {sources}; wanted: {wanted}"
        if first and len(now) != ranks:
            before = replace(plain, steps=first)
    if not _same(endings, _expected(replace(plain, ranks=settings.ranks), before)):
        yield f"after a restart the numbers differ: {endings}"
    yield from _judge_leftovers(folder)


def _judge_right(endings: Mapping[int, Ending], fault: Fault, folder: Path) -> Iterator[str]:
    """Yield what is wrong with a job that ended in the right numbers."""
    if KINDS[fault.kind].ends and fault.place not in SAVING:  # not all steps and ranks pass these
        yield "the job ended as if nothing had happened"
    failed = [text for each in endings.values() for text in each["failed_saves"]]
    for text in failed:
        if not _is_clear(text, fault) and fault.kind != "two jobs":
            yield f"an unclear error: {text}"
    if fault.kind == "full disk" and not failed:
        yield "no save failed"
    if fault.kind == "slow rank":
        for ending in endings.values():
            slow = [tuple(each) for each in ending["slow"]]
            phase = SLOW_IN[fault.place]
            if {rank for rank, _ in slow} != {fault.victim} or (fault.victim, phase) not in slow:
                yield f"these are named as slow: {slow}"
    yield from _judge_leftovers(folder)


def _judge_groups(fault: Fault) -> Verdict:
    """Kill or stop a rank of a replica group; the others go on, and the group comes back."""
    from elastic.drill import RANKS  # with torchft alone
    from support.elastic.check import check_against_replay
    from support.elastic.run import ElasticRun
    from support.elastic.run import Fault as OfGroup

    drawn = OfGroup.drawn(random.Random(fault.seed), RANKS)
    verdict, start = Verdict(fault, ended="the right numbers"), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fullshard-campaign-") as folder:
        try:
            with ElasticRun(Path(folder), RANKS) as run, _busy(fault.busy):
                for group in RANKS:
                    run.start(group)
                while not run.together(3):
                    run.follow()
                run.strike(replace(drawn, phase=fault.place))
                run.finish()
            check_against_replay(Path(folder), RANKS)
        except AssertionError as error:
            verdict.wrong.append(str(error))
    verdict.seconds = time.monotonic() - start
    return verdict


def judge(fault: Fault, *, restarts: bool = True) -> Verdict:
    """Run the job with the fault, and again without it; return what was wrong.

    Args:
        fault: the fault.
        restarts: whether a job that ended is started again, from its last checkpoint.
    """
    verdict = Verdict(fault)
    missing = lacking(fault.kind)
    if missing:
        verdict.ended = f"not run, as {missing}"
        return verdict
    if fault.kind == "lost replica group":
        return _judge_groups(fault)
    wanted = _expected(replace(fault.settings, hosts=()))
    folder = Path(tempfile.mkdtemp(prefix="fullshard-campaign-"))
    try:
        start = time.monotonic()
        endings = _strike(fault, folder)
        verdict.seconds = time.monotonic() - start
        if _same(endings, wanted):
            verdict.ended = "the right numbers"
            verdict.wrong += _judge_right(endings, fault, folder)
        else:
            verdict.ended = "errors"
            verdict.wrong += _judge_errors(endings, fault)
            if KINDS[fault.kind].ends is False:
                verdict.wrong.append(f"the job did not have the right numbers: {endings}")
            starts_again = fault.kind not in ("corrupted checkpoint", "two jobs")
            if starts_again and (restarts or fault.settings.hosts):
                verdict.wrong += _restart(fault, folder)
    finally:
        shutil.rmtree(folder)
    return verdict
