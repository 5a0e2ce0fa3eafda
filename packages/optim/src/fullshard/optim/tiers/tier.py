"""The arguments, the statistics and the error of an ``OffloadedOptimizer``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fullshard.sharding.spi import require_bool, require_count

__all__ = ["FileTier", "OffloadStatistics", "StateOffloadError"]


class StateOffloadError(RuntimeError):
    """Optimizer state could not be read or written; raised on every rank of the model."""


@dataclass(frozen=True, kw_only=True)
class OffloadStatistics:
    """The traffic of one ``OffloadedOptimizer`` since it was made, on this rank.

    Attributes:
        bytes_read: bytes of state read from the file.
        bytes_written: bytes of state written to it.
        wait_seconds: seconds that steps waited for the disk.
        buffer_bytes: bytes of host memory that buffers take between steps.
        direct: whether the file system allows direct I/O, past the page cache.
    """

    bytes_read: int
    bytes_written: int
    wait_seconds: float
    buffer_bytes: int
    direct: bool


@dataclass(frozen=True)
class FileTier:
    """Where and how an ``OffloadedOptimizer`` keeps state in files.

    Args:
        folder: a folder on a local disk, best on NVMe. Each rank makes one file there, which has no
            name and is gone when the process ends. Ranks may share the folder.
        bucket_mb: MiB of this rank's parameters whose state is in memory at once. A larger
            parameter is a bucket by itself.
        buffers: buckets of state in memory; one is stepped while others are read or written.
        threads: how many reads and writes run at once.
        direct: use direct I/O if the file system supports it: state does not fill the page cache.
        min_bytes: smaller tensors of state stay in memory, such as the numbers of steps.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if one is out of its range.
    """

    folder: str | Path
    bucket_mb: float = 16
    buffers: int = 3
    threads: int = 4
    direct: bool = True
    min_bytes: int = 4096

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.folder, (str, Path)):
            raise TypeError(f"folder is a {type(self.folder).__name__}; pass a path")
        if Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise ValueError(f"folder is {str(self.folder)!r}, which is a file; pass a folder")
        if isinstance(self.bucket_mb, bool) or not isinstance(self.bucket_mb, (int, float)):
            raise TypeError(f"bucket_mb is {self.bucket_mb!r}; pass a number of MiB")
        if not 0 < self.bucket_mb < float("inf"):
            raise ValueError(f"bucket_mb is {self.bucket_mb}; pass a positive number of MiB")
        for name in ("buffers", "threads", "min_bytes"):
            require_count(name, getattr(self, name))
        if self.buffers < 3:
            raise ValueError(
                f"buffers is {self.buffers}; pass 3 or more: one bucket is read, one stepped and "
                "one written at the same time"
            )
        require_bool("direct", self.direct)
