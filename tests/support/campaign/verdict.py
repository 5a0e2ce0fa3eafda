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
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.checkpoint import FileSystemReader

from fullshard.checkpoint import DamagedCheckpointError, check_checkpoint
from support.campaign.faults import KINDS, Fault, Settings
from support.campaign.job import PLANTED, run_job
from support.pool.messages import Outcome
from support.pool.ranks import RankPool, RanksFailed

__all__ = ["LIMIT", "MOUNTED", "Verdict", "can_mount", "judge", "run_ranks"]

MOUNTED = ("small /dev/shm", "full disk")
"""Kinds that need a small disk, and ranks that are started anew, which takes seconds."""

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
def _expected(settings: Settings) -> dict[int, Ending]:
    """Return how the job ends without a fault."""
    with tempfile.TemporaryDirectory(prefix="fullshard-campaign-") as folder:
        fault = Fault(-1, "none", "", 0, 0, 0, 0.0, settings)
        endings = run_ranks(fault, Path(folder))
    assert all("digest" in each for each in endings.values()), endings
    return endings


def _same(endings: Mapping[int, Ending], wanted: Mapping[int, Ending]) -> bool:
    """Tell whether the numbers are those of the job without a fault, from its first step on."""
    for rank, ending in endings.items():
        if "digest" not in ending:
            return False
        losses = wanted[rank]["losses"][ending["first"] :]
        if (ending["losses"], ending["digest"]) != (losses, wanted[rank]["digest"]):
            return False
    return True


def _is_clear(text: str, fault: Fault) -> bool:
    """Tell whether an error says what happened, or on which rank."""
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
            if rank != fault.victim or fault.kind not in ("kill", "exit"):
                yield f"rank {rank} died without an error"
        elif rank != fault.victim and not _is_clear(ending["error"], fault):
            yield f"rank {rank} has an unclear error: {ending['error']}"


def _judge_leftovers(folder: Path) -> Iterator[str]:
    """Yield files that the jobs left: all but those that the checkpoint names."""
    scratch = folder / "scratch"
    left = [name for name in os.listdir(scratch) if not name.startswith("torchinductor")]  # torch's
    if left:
        yield f"files are left in the folder for temporary files: {left}"
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


def can_mount() -> bool:
    """Tell whether this process may mount something for its children alone: root may, mostly."""
    try:
        done = subprocess.run([*_WITH_MOUNT, "/dev/shm", "true"], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


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


def judge(fault: Fault, *, restarts: bool = True) -> Verdict:
    """Run the job with the fault, and again without it; return what was wrong.

    Args:
        fault: the fault.
        restarts: whether a job that ended is started again, from its last checkpoint.
    """
    verdict, kind = Verdict(fault), KINDS[fault.kind]
    if fault.kind in MOUNTED and not can_mount():
        verdict.ended = "not run, as a small disk needs root"
        return verdict
    wanted = _expected(fault.settings)
    folder = Path(tempfile.mkdtemp(prefix="fullshard-campaign-"))
    try:
        start = time.monotonic()
        endings = _strike(fault, folder)
        verdict.seconds = time.monotonic() - start
        if _same(endings, wanted):
            verdict.ended = "the right numbers"
            if kind.ends:
                verdict.wrong.append("the job ended as if nothing had happened")
            failed = [text for each in endings.values() for text in each["failed_saves"]]
            verdict.wrong += [
                f"an unclear error: {text}"
                for text in failed
                if not _is_clear(text, fault) and fault.kind != "two jobs"
            ]
            if fault.kind == "full disk" and not failed:
                verdict.wrong.append("no save failed")
            verdict.wrong += _judge_leftovers(folder)
        else:
            verdict.ended = "errors"
            verdict.wrong += _judge_errors(endings, fault)
            if kind.ends is False:
                verdict.wrong.append(f"the job did not have the right numbers: {endings}")
            if restarts and fault.kind not in ("corrupted checkpoint", "two jobs"):
                again = run_ranks(fault.none(), folder)
                if not _same(again, wanted):
                    verdict.wrong.append(f"after a restart the numbers differ: {again}")
                verdict.wrong += _judge_leftovers(folder)
    finally:
        shutil.rmtree(folder)
    return verdict
