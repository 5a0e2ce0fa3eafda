"""A folder in which one set of files takes another's place, whole at every moment.

Owns the names of files that are being written, and the order in which a set is replaced.
[Note: whole at every moment] New files have names that no set had before: they carry a save id. The
index is replaced last, by renaming, and what it named before goes after that. One file is written
under a name of its own and renamed. Between one file and an indexed set, both are there for a
moment, each whole: readers that look for the one file first (transformers, and this package) and
those that look for the index first get the old or the new. Other files of the folder are left
alone, so it need not be swapped for another, which a mounted folder could not be. The next save
removes the files that a killed save left.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.checkpoint.files.headers import WeightsError
from fullshard.checkpoint.files.sets import index_names

__all__ = ["SaveFolder"]


@dataclass(frozen=True)
class SaveFolder:
    """Where a set is written.

    Attributes:
        path: the folder.
        stem: what the set is called: ``model``.
        save_id: hexadecimal, of this save alone.
        count: how many files it has.
    """

    path: Path
    stem: str
    save_id: str
    count: int

    @property
    def single(self) -> Path:
        """The one file of a set without an index."""
        return self.path / f"{self.stem}.safetensors"

    @property
    def index(self) -> Path:
        """The index of a set of several files."""
        return self.path / f"{self.stem}.safetensors.index.json"

    def written(self, number: int) -> Path:
        """Return the path under which file ``number`` is written."""
        if self.count == 1:
            return self._own(self.single)
        name = f"{self.stem}-{self.save_id}-{number + 1:05}-of-{self.count:05}.safetensors"
        return self.path / name

    def final(self, number: int) -> Path:
        """Return the path that file ``number`` has in the set."""
        return self.single if self.count == 1 else self.written(number)

    def _own(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{self.save_id}")

    def prepare(self, sizes: Sequence[int]) -> None:
        """Make the folder, and remove what a killed save left.

        Args:
            sizes: bytes of each file of the set, the index included.

        Raises:
            OSError: if it cannot be made, or has no room for the set; the old set is there then.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove_left()
        system = os.statvfs(self.path)
        block, free = system.f_frsize, system.f_bavail * system.f_frsize
        # files take whole blocks, and their names may take one more of the folder
        needed = block * (1 + sum(-(-size // block) for size in sizes))
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"{self.path} has {free} bytes free, and the new set needs {needed}: its files "
                f"have {sum(sizes)}, and take whole blocks of {block}. The old set stays until the "
                f"new one is complete; free {needed - free} bytes more, or save elsewhere",
            )

    def index_text(self, weight_map: Mapping[str, str], total: int) -> bytes:
        """Return the contents of the index of the set.

        Args:
            weight_map: the file name of each tensor.
            total: bytes of all tensors.
        """
        told = {
            "metadata": {"total_size": total, "save_id": self.save_id},
            "weight_map": dict(sorted(weight_map.items())),
        }
        return json.dumps(told, indent=2, ensure_ascii=False).encode()

    def _remove_left(self) -> None:
        stem = re.escape(self.stem)
        numbered = re.compile(rf"{stem}-[0-9a-f]{{8}}-\d{{5}}-of-\d{{5}}\.safetensors")
        unnamed = re.compile(rf"\.{stem}\.safetensors(\.index\.json)?\.[0-9a-f]{{8}}")
        try:
            kept = set(index_names(self.index).values()) if self.index.exists() else set()
        except (OSError, WeightsError):
            return  # what belongs to it is not known
        for name in os.listdir(self.path):
            if unnamed.fullmatch(name) or (numbered.fullmatch(name) and name not in kept):
                (self.path / name).unlink(missing_ok=True)

    def commit(self, weight_map: Mapping[str, str], total: int) -> list[Path]:
        """Commit the new files as the set, and return the old files that can be removed.

        Args:
            weight_map: the file name of each tensor.
            total: bytes of all tensors.

        Raises:
            OSError: if that failed; the old set is there then.
        """
        old = self._old()
        if self.count == 1:
            self._check(self.written(0))
            os.replace(self.written(0), self.single)
        else:
            own = self._own(self.index)
            with own.open("wb") as file:
                file.write(self.index_text(weight_map, total))
                file.flush()
                os.fsync(file.fileno())
            self._check(*(self.written(number) for number in range(self.count)))
            os.replace(own, self.index)
        return old

    def _check(self, *files: Path) -> None:
        there = set(os.listdir(self.path))
        missing = [file.name for file in files if file.name not in there]
        if missing:
            raise OSError(
                errno.ENOENT,
                f"{', '.join(missing[:3])} was written on another host and is not in {self.path} "
                "here; save into a folder that all hosts share",
            )

    def _old(self) -> list[Path]:
        """Return the files of the old set that the new one does not replace by renaming."""
        found = [self.single] if self.count > 1 else [self.index]
        with contextlib.suppress(OSError, WeightsError):
            names = dict.fromkeys(index_names(self.index).values())
            found += [self.path / name for name in names if Path(name).name == name]
        return [path for path in found if path != self.final(0)]

    def remove(self, files: Sequence[Path]) -> None:
        """Remove ``files`` of the old set, the one file or the index first.

        Raises:
            OSError: if one cannot be removed; the new set is there all the same.
        """
        self._sync()
        for path in files:
            path.unlink(missing_ok=True)
        self._sync()

    def _sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def abandon(self, numbers: Sequence[int]) -> None:
        """Remove new files that did not become the set."""
        for path in [*map(self.written, numbers), self._own(self.index)]:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
