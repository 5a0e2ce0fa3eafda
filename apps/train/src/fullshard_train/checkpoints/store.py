"""The folders of checkpoints, which appear in one atomic step.

Owns names and atomicity: a checkpoint is written into a hidden folder, brought to the disk, and
renamed; the rename is the commit. A folder with a checkpoint's name is therefore complete. `latest`
names the newest one for people and tools; a kill between rename and pointer leaves it one behind,
so the newest folder counts. An old one goes the same way back: renamed, then deleted. Refuses to
know what is in a checkpoint beyond its file list, and which ranks there are: rank 0 calls it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

from fullshard_train.errors import TrainError

__all__ = ["CheckpointStore", "checksum", "verify"]

_NAME = re.compile(r"step-(\d{8,})")
_MANIFEST = "files.json"


class CheckpointStore:
    """The checkpoints of one run, in one folder.

    Args:
        root: the folder; it is made when the first checkpoint is.
        keep: how many of the newest a commit leaves there; 0 for all.
    """

    def __init__(self, root: Path, *, keep: int = 0) -> None:
        self.root = root
        self.keep = keep

    def path(self, step: int) -> Path:
        """The path of the checkpoint after `step` updates."""
        return self.root / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        """The path of the checkpoint after `step` updates during writing."""
        return self.root / f".writing-{step:08d}"

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or None when there is none."""
        return max(self._complete(), key=_step_of, default=None)

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint after `step` updates into.

        Files of a killed writer are removed.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.root.glob(".writing-*"), *self.root.glob(".deleting-*")):
            shutil.rmtree(leftover)
        folder = self.unfinished(step)
        folder.mkdir()
        return folder

    def commit(self, step: int, checksums: Mapping[str, int]) -> Path:
        """Turn the folder of `begin` into a checkpoint, and points `latest` at it.

        Then, and not before, those that are not to be kept go.

        Args:
            step: as given to `begin`.
            checksums: of every file in the folder, as `checksum` gives them, by name.
        """
        folder, final = self.unfinished(step), self.path(step)
        _write_through(folder / _MANIFEST, json.dumps(dict(sorted(checksums.items())), indent=1))
        _sync_folder(folder)
        folder.rename(final)
        _sync_folder(self.root)
        pointer = self.root / ".latest"
        _write_through(pointer, final.name + "\n")
        pointer.replace(self.root / "latest")
        _sync_folder(self.root)
        self._prune()
        return final

    def _prune(self) -> None:
        old = sorted(self._complete(), key=_step_of)[: -self.keep] if self.keep else []
        for path in old:
            # A folder that is half deleted must not look complete.
            doomed = self.root / f".deleting-{path.name}"
            path.rename(doomed)
            shutil.rmtree(doomed)

    def _complete(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        return [
            path for path in self.root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()
        ]


def checksum(path: Path) -> int:
    """The CRC-32 of a file: it finds damage, not intent."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value


def verify(checkpoint: Path, *, part: int = 0, parts: int = 1) -> None:
    """Pass if the files of a checkpoint are what was written.

    Checks every `parts`-th one, from number `part` on: the ranks share the work.

    Raises:
        TrainError: the folder is not a checkpoint, or a file is missing or damaged.
    """
    try:
        checksums = json.loads((checkpoint / _MANIFEST).read_text(encoding="utf-8"))
        names = sorted(checksums)[part::parts]
    except (OSError, ValueError, TypeError) as error:
        raise TrainError(
            f"checkpoint {checkpoint}: no readable {_MANIFEST} in it: {error}"
        ) from error
    for name in names:
        try:
            found = checksum(checkpoint / name)
        except OSError as error:
            raise TrainError(
                f"checkpoint {checkpoint}: {name}: {error.strerror or error}"
            ) from error
        if found != checksums[name]:
            raise TrainError(
                f"checkpoint {checkpoint}: {name} is damaged (its CRC-32 is {found:08x}, not"
                f" {checksums[name]:08x}); resume from another checkpoint"
            )


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match.group(1))


def _write_through(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
