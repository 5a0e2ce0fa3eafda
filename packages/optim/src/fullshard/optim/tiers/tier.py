"""The tiers, the statistics and the error of an ``OffloadedOptimizer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from fullshard.comm.spi import can_pin
from fullshard.optim.tiers.device_staging import DeviceStaging
from fullshard.optim.tiers.host_memory import HostMemory
from fullshard.optim.tiers.staging import Staging
from fullshard.optim.tiers.state_file import StateFile
from fullshard.sharding.spi import require_bool, require_count

__all__ = ["FileTier", "HostTier", "OffloadStatistics", "StateOffloadError"]

_ROOM = 32  # the file may grow to this many times the parameters' bytes; it is sparse until then
_LEAST_ROOM = 256 << 20  # bytes
_KEPT = 4  # buffers are kept up to this many times a bucket's parameters; Adam's state has 2 to 4
_LEAST_KEPT = 1 << 20  # bytes: the sizes of small tensors are rounded up


class StateOffloadError(RuntimeError):
    """Optimizer state could not be read or written; raised on every rank of the model."""


@dataclass(frozen=True, kw_only=True)
class OffloadStatistics:
    """The traffic of one ``OffloadedOptimizer`` since it was made, on this rank.

    Attributes:
        bytes_read: bytes of state read from the file, or copied from the host's memory.
        bytes_written: bytes of state written to it.
        wait_seconds: seconds that the host waited for the disk or for copies.
        buffer_bytes: bytes of memory that buffers take between steps: none, unless page-locked.
        direct: whether the file system allows direct I/O, past the page cache.
    """

    bytes_read: int
    bytes_written: int
    wait_seconds: float
    buffer_bytes: int
    direct: bool


class OpenTier(NamedTuple):
    """What a tier opened for one optimizer.

    Attributes:
        space: where state is between steps.
        staging: the buffers through which state travels.
    """

    space: StateFile | HostMemory
    staging: Staging | DeviceStaging


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
        require_bool("direct", self.direct)
        require_count("threads", self.threads)
        _require_buckets(self)

    advice: ClassVar[str] = (
        "the state stays in memory; save a checkpoint, then use a folder with more space"
    )
    """What to do if there is no room for the state of a parameter; a part of the error."""

    def open(self, params: Sequence[torch.Tensor]) -> OpenTier:
        """Make the file for the state of ``params``, this rank's parts.

        Raises:
            OSError: if that is not possible.
        """
        room = _ROOM * sum(param.nbytes for param in params) + _LEAST_ROOM
        host = torch.device("cpu")
        pin = any(param.device != host for param in params) and can_pin(host)
        file = StateFile(Path(self.folder), room, threads=self.threads, direct=self.direct)
        kept = int(_KEPT * self.bucket_mb * 2**20) + _LEAST_KEPT
        return OpenTier(file, Staging(file, batches=self.buffers, kept_bytes=kept, pin=pin))


@dataclass(frozen=True, kw_only=True)
class HostTier:
    """Optimizer state in host memory, brought to the device for the step, bucket by bucket.

    The memory is page-locked where the accelerator has such memory. For parameters on the CPU
    nothing is copied: their state is in host memory anyway.

    Args:
        bucket_mb: MiB of this rank's parameters whose state is on the device at once. A larger
            parameter is a bucket by itself.
        buffers: buckets of state on the device; one is stepped while others are copied.
        min_bytes: smaller tensors of state stay on the device, such as the numbers of steps.

    Raises:
        TypeError: if an argument is of the wrong type.
        ValueError: if one is out of its range.
    """

    bucket_mb: float = 16
    buffers: int = 3
    min_bytes: int = 4096

    advice: ClassVar[str] = (
        "the state stays on the device; save a checkpoint, then run with more host memory or with "
        "a FileTier"
    )
    """What to do if there is no room for the state of a parameter; a part of the error."""

    def __post_init__(self) -> None:
        """Check the fields."""
        _require_buckets(self)

    def open(self, params: Sequence[torch.Tensor]) -> OpenTier:
        """Return memory for the state of ``params``, this rank's parts."""
        memory = HostMemory()
        return OpenTier(memory, DeviceStaging(memory))


def _require_buckets(tier: FileTier | HostTier) -> None:
    """Check what all tiers have."""
    if isinstance(tier.bucket_mb, bool) or not isinstance(tier.bucket_mb, (int, float)):
        raise TypeError(f"bucket_mb is {tier.bucket_mb!r}; pass a number of MiB")
    if not 0 < tier.bucket_mb < float("inf"):
        raise ValueError(f"bucket_mb is {tier.bucket_mb}; pass a positive number of MiB")
    for name in ("buffers", "min_bytes"):
        require_count(name, getattr(tier, name))
    if tier.buffers < 3:
        raise ValueError(
            f"buffers is {tier.buffers}; pass 3 or more: one bucket is read, one stepped and "
            "one written at the same time"
        )
