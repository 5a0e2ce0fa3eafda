"""The folder of a run's memory on one host: its names, its locks, what is found after a kill.

Owns the tree ``<folder>/<run>/<attempt>-<token>/rank-<rank>.<slot>.{own,copy}``. A process locks
one file in the folder. The system releases the lock when the process ends, so the memory of a
killed run differs from memory in use.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.files.write_errors import write_error
from fullshard.checkpoint.memory.segments import Manifest, read_manifest

__all__ = ["AttemptFolder", "MemoryRun", "default_folder", "memory_runs", "open_run", "segments_in"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ATTEMPT = re.compile(r"(\d{6,})-[0-9a-f]{8}")
_SHARED_MEMORY = Path("/dev/shm")

_held: set[Path] = set()
"""Locks of this process: opening and closing one of them would release it."""


def default_folder() -> Path:
    """Return the folder in shared memory that belongs to this user.

    Raises:
        FileNotFoundError: if the system has no ``/dev/shm``.
    """
    if not _SHARED_MEMORY.is_dir():
        raise FileNotFoundError(
            f"{_SHARED_MEMORY} is not there, expected on Linux; pass folder= on a file system that "
            "is in memory"
        )
    return _SHARED_MEMORY / f"fullshard-{os.getuid()}"


def open_run(folder: Path, run: str) -> Path:
    """Make the folder of a run, readable by this user alone, and return it.

    Raises:
        ValueError: if ``run`` cannot be a name of a folder.
        OSError: if the folder cannot be made.
        PermissionError: if the folder belongs to another user. Manifests are pickles.
        RuntimeError: if a process of an earlier attempt is alive.
    """
    if not _NAME.fullmatch(run):
        raise ValueError(
            f"run is {run!r}; pass letters, digits, dots, underscores and dashes, such as the name "
            "or the number of the job"
        )
    path = folder / run
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise write_error(error, path) from error
    for each in (folder, path):
        found = each.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise PermissionError(
                f"{each} belongs to user {found.st_uid}, with mode {stat.S_IMODE(found.st_mode):o};"
                f" expected user {os.getuid()} and nobody else who may write; pass another folder="
            )
    holders = lock_holders(path)
    if holders:
        raise RuntimeError(
            f"processes {', '.join(map(str, holders))} on this host use the memory of run {run}; "
            "give each job another name, or end them first"
        )
    return path


def attempts_in(run: Path) -> dict[Path, int]:
    """Return the folders of a run's attempts, and their numbers."""
    found = {}
    for path in sorted(run.iterdir()) if run.is_dir() else ():
        matched = _ATTEMPT.fullmatch(path.name)
        if matched:
            found[path] = int(matched[1])
    return found


def segments_in(attempt: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yield the sealed segments of an attempt, and their manifests."""
    for path in sorted(attempt.glob("*.manifest")):
        manifest = read_manifest(path)
        if manifest is not None:
            yield path.with_suffix(""), manifest


def lock_holders(run: Path) -> list[int]:
    """Return the ids of processes that hold a lock on an attempt of ``run``."""
    holders = []
    for path in run.glob("*/*.lock"):
        if path in _held:
            holders.append(os.getpid())
            continue
        try:
            with path.open("rb") as file:
                try:
                    fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except OSError:
                    holders.append(int(file.read() or 0))
        except FileNotFoundError:
            continue
    return holders


class AttemptFolder:
    """The folder of one attempt on this host.

    Args:
        run: the folder of the run.
        attempt: the number of the attempt.
        token: of this attempt alone.
        rank: of this process.
    """

    def __init__(self, run: Path, attempt: int, token: str, rank: int) -> None:
        """Make the folder, and take the lock of this process."""
        self.run = run
        self.path = run / f"{attempt:06}-{token}"
        self.path.mkdir(mode=0o700, exist_ok=True)
        lock = self.path / f"rank-{rank:05}.lock"
        self._lock = lock.open("wb")
        fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._lock.write(str(os.getpid()).encode())
        self._lock.flush()
        _held.add(lock)

    def slot(self, rank: int, number: int, kind: str) -> Path:
        """Return the path of a segment with shards of ``rank``; ``kind`` is own or copy."""
        return self.path / f"rank-{rank:05}.{number}.{kind}"

    @property
    def is_open(self) -> bool:
        """Whether this process holds its lock."""
        return not self._lock.closed

    def old_nbytes(self) -> int:
        """Return the bytes of segments of earlier attempts."""
        return sum(_nbytes(path) for path in self._old(None))

    def remove_old(self, kept: tuple[str, int] | None) -> None:
        """Remove segments of earlier attempts.

        Args:
            kept: token and number of the save to keep; None: none.
        """
        if kept is None:
            for attempt in attempts_in(self.run):
                if attempt != self.path:
                    shutil.rmtree(attempt, ignore_errors=True)
            return
        for path in self._old(kept):
            path.unlink(missing_ok=True)

    def _old(self, kept: tuple[str, int] | None) -> Iterator[Path]:
        for attempt in attempts_in(self.run):
            if attempt == self.path:
                continue
            needed = {
                each
                for path, manifest in segments_in(attempt)
                if (manifest.token, manifest.number) == kept
                for each in (path, path.with_name(f"{path.name}.manifest"))
            }
            for path in sorted(attempt.iterdir(), key=lambda each: each.suffix != ".manifest"):
                if path not in needed and path.suffix != ".lock":
                    yield path

    def close(self) -> None:
        """Release the lock of this process."""
        _held.discard(Path(self._lock.name))
        self._lock.close()

    def remove(self) -> None:
        """Remove the memory of the run on this host, all attempts."""
        self.close()
        shutil.rmtree(self.run, ignore_errors=True)


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # another process of this host removed it
        return 0


@dataclass(frozen=True)
class MemoryRun:
    """Memory of a run on this host, as ``memory_runs`` found it.

    Attributes:
        name: of the run.
        folder: in which it is.
        nbytes: of all files.
        steps: of which there are segments, in ascending order.
        process_ids: of processes that use it; empty: the run ended, or was killed.
    """

    name: str
    folder: Path
    nbytes: int
    steps: tuple[int, ...]
    process_ids: tuple[int, ...]

    def remove(self) -> None:
        """Remove it.

        Raises:
            RuntimeError: if processes use it.
        """
        holders = lock_holders(self.folder)
        if holders:
            raise RuntimeError(
                f"the memory of run {self.name} in {self.folder} is used by processes "
                f"{', '.join(map(str, holders))}; end them first"
            )
        shutil.rmtree(self.folder)


def memory_runs(folder: str | os.PathLike[str] | None = None) -> list[MemoryRun]:
    """Return the runs that have checkpoints in the memory of this host, also after a kill.

    Args:
        folder: the argument of ``MemoryCheckpoints``; None: the default.
    """
    if folder is None and sys.platform != "linux":
        return []
    root = default_folder() if folder is None else Path(folder)
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_dir():
            files = [each for each in path.rglob("*") if each.is_file()]
            steps = {
                manifest.step
                for attempt in attempts_in(path)
                for _, manifest in segments_in(attempt)
            }
            holders = tuple(lock_holders(path))
            nbytes = sum(map(_nbytes, files))
            found.append(MemoryRun(path.name, path, nbytes, tuple(sorted(steps)), holders))
    return found
