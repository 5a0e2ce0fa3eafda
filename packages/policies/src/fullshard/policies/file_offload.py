"""Offload of shards to files: host memory that is mapped, and of which little is resident.

``FileOffloadPolicy`` is the main class. ``shard_file`` reads and drops the memory of shards.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
import weakref
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from fullshard.policies.elsewhere import require_steps_elsewhere
from fullshard.policies.file_space import FileSpace
from fullshard.policies.offload import OffloadPolicy
from fullshard.policies.shard_file import ShardFile
from fullshard.sharding import OffloadToCPU
from fullshard.sharding.spi import require_bool, require_cap, require_count

__all__ = ["FileOffloadPolicy", "FileOffloadStatistics"]

_HOST = OffloadToCPU(pin_memory=False)
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # types of file systems, of statfs
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class FileOffloadStatistics:
    """The traffic of one ``FileOffloadPolicy`` so far, on this rank.

    Attributes:
        file_bytes: bytes that are reserved on the disk.
        resident_bytes: bytes of shards that were used last, and stay in memory.
        reads_ahead: shards that were read ahead of their use.
        reads_late: uses that had to wait for their shard.
        wait_seconds: seconds that they waited.
    """

    file_bytes: int
    resident_bytes: int
    reads_ahead: int
    reads_late: int
    wait_seconds: float


class _Lost(NamedTuple):
    """A weak reference to a gradient that is lost, and the error to raise for it."""

    gradient: weakref.ref[torch.Tensor]
    error: str


@dataclass(frozen=True)
class FileOffloadPolicy(OffloadPolicy):
    """Shards of parameters in a file of this rank, in memory only around their use.

    A shard is host memory that is mapped from the file: optimizers, state dicts, checkpoints and
    clipping use it as always. The policy reads shards ahead of their gathers, in the order of the
    last step, and drops the shards that were not used for longest. Gradients are in memory on the
    CPU, or in the file with ``gradients=True``. Optimizer state is in memory on the CPU. Pass
    one policy to all ``fully_shard`` calls of a model.

    Attributes:
        folder: a folder on a local disk, best on NVMe. Each rank makes one file there, which has no
            name and is gone when the process ends. Ranks may share the folder.
        resident_mb: MiB of shards that stay in memory, of all modules with this policy. More is
            resident only during a step of an optimizer that steps all parameters at once.
        read_ahead_mb: MiB of shards that are read ahead of use; at most ``resident_mb``.
        min_bytes: smaller shards stay in memory.
        gradients: keep reduced gradients in the file, from their reduction until they are freed.
            Like shards, they are read for their use, and count for ``resident_mb``.
        optimizer_state: keep the optimizer's state on the CPU, and step there; otherwise the
            optimizer steps where the model computes.
        may_fail: True: one rank may run out of space or fail to read, so all ranks compare errors
            before they continue.
    """

    folder: str | Path
    resident_mb: float = field(default=256, kw_only=True)
    read_ahead_mb: float = field(default=64, kw_only=True)
    min_bytes: int = field(default=65536, kw_only=True)
    gradients: bool = field(default=False, kw_only=True)
    optimizer_state: bool = field(default=True, kw_only=True)
    _file: ShardFile = field(init=False, repr=False, compare=False)
    _lost: list[_Lost] = field(init=False, repr=False, compare=False, default_factory=list)

    may_fail: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the fields, and open the file.

        Raises:
            TypeError: if a field is of the wrong type.
            ValueError: if a field is out of its range, or no file can be made in the folder.
            ImportError: if fullshard-optim is not installed.
        """
        require_steps_elsewhere("FileOffloadPolicy")
        if not isinstance(self.folder, (str, Path)):
            raise TypeError(f"folder is a {type(self.folder).__name__}; pass a path")
        for name in ("resident_mb", "read_ahead_mb"):
            require_cap(name, getattr(self, name))
        require_count("min_bytes", self.min_bytes)
        require_bool("gradients", self.gradients)
        require_bool("optimizer_state", self.optimizer_state)
        if self.read_ahead_mb > self.resident_mb:
            raise ValueError(
                f"read_ahead_mb is {self.read_ahead_mb} and resident_mb {self.resident_mb}; what "
                "is read ahead stays in memory until its use: pass a larger resident_mb"
            )
        file = ShardFile(
            _opened(Path(self.folder)),
            resident_bytes=int(self.resident_mb * _MIB),
            ahead_bytes=int(self.read_ahead_mb * _MIB),
        )
        object.__setattr__(self, "_file", file)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the file: a copy opens its own."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return _made_of, (type(self), values)

    @property
    def statistics(self) -> FileOffloadStatistics:
        """Counts of reads and waits of the policy."""
        return FileOffloadStatistics(
            file_bytes=self._file.space.nbytes,
            resident_bytes=self._file.resident_bytes,
            reads_ahead=self._file.reads_ahead,
            reads_late=self._file.reads_late,
            wait_seconds=self._file.wait_seconds,
        )

    # -- the answers to sharding's question -------------------------------------------------------

    @property
    def stores_gradients(self) -> bool:
        """Whether ``stage_out`` stores gradients in the file."""
        return self.gradients

    @property
    def lands_early(self) -> bool:
        """Whether a gradient is to be in the file before the next reduction."""
        return self.gradients

    def home(self, device: torch.device) -> torch.device:
        """Return the CPU."""
        return _HOST.home(device)

    def store(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard`` in the file; itself if it is small, or of a class of its own.

        Without space on the disk the shard stays in memory, and ``take_error`` reports that.
        """
        return self._stored(shard, "shard")

    def stage_in(self, shard: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return ``shard`` on ``device``, after its pages were read; wrong values on an error."""
        if self._require(shard, in_order=True):
            return _HOST.stage_in(shard, device)
        return torch.zeros_like(shard, device=device)

    def stage_out(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return ``gradient`` on the CPU, with ``gradients=True`` as ``store`` returns a shard.

        A gradient that stays in memory is copied: it shares the memory of its whole group.
        """
        gradient = _HOST.stage_out(gradient)
        if not self.gradients:
            return gradient
        stored = self._stored(gradient, "gradient")
        shared = stored is gradient and stored.untyped_storage().nbytes() > stored.nbytes
        return stored.clone() if shared else stored

    def read_in(self, gradient: torch.Tensor) -> bool:
        """Read the pages of a gradient, and return whether that was possible."""
        return self._read_gradient(gradient, gradient)

    def accumulate(self, present: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add ``gradient`` to ``present``; if either cannot be read, ``present`` is lost."""
        if all(self._read_gradient(each, present) for each in (present, gradient)):
            present.add_(gradient)

    def error_of(self, gradient: torch.Tensor) -> str:
        """Return why ``gradient`` is lost; empty if it is not."""
        self._lost[:] = [each for each in self._lost if each.gradient() is not None]
        return next((each.error for each in self._lost if each.gradient() is gradient), "")

    def stage_step(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return ``tensor`` where the optimizer's state is, after its pages were read."""
        self._require(tensor, in_order=False)
        if self.optimizer_state:
            return _HOST.stage_step(tensor, device)
        return tensor.to(device, non_blocking=True)

    def arrived(self, device: torch.device) -> None:
        """Wait for copies."""
        _HOST.arrived(device)

    def take_error(self) -> str:
        """Return the first error since the last call; empty if there was none.

        The engine asks at the end of each backward, and of a forward without one: this ends a pass.
        """
        self._file.end_pass()
        return self._file.take_error()

    def _stored(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Return a tensor in the file, or itself; keep the error if the disk has no space."""
        usable = type(tensor) in _PLAIN and tensor.device.type == "cpu" and tensor.is_contiguous()
        if not usable or tensor.nbytes < self.min_bytes or self._file.find(tensor) is not None:
            return tensor
        try:
            return self._file.store(tensor)
        except OSError as error:
            self._file.note(
                f"no space for {tensor.nbytes} bytes of a {what} in {str(self.folder)!r}: "
                f"{error.strerror}; use a folder with more space"
            )
            return tensor

    def _require(self, tensor: torch.Tensor, *, in_order: bool) -> bool:
        """Have the pages of a shard read, and return whether they could be."""
        error = self._error_of_reading(tensor, in_order=in_order)
        if error:
            self._file.note(f"{tensor.nbytes} bytes of a shard {error}; load the last checkpoint")
        return not error

    def _read_gradient(self, gradient: torch.Tensor, needed_for: torch.Tensor) -> bool:
        """Have a gradient read; if that fails, ``needed_for`` is lost."""
        error = self._error_of_reading(gradient, in_order=False)
        if error:
            text = (
                f"{gradient.nbytes} bytes of a gradient {error}; load the last checkpoint, or free "
                "the gradients with zero_grad() and run all backwards of this step again"
            )
            self._lost.append(_Lost(weakref.ref(needed_for), text))
        return not error

    def _error_of_reading(self, tensor: torch.Tensor, *, in_order: bool) -> str:
        """Have the pages of a tensor read, and return what went wrong; empty: nothing."""
        if type(tensor) not in _PLAIN or tensor.device.type != "cpu":
            return ""
        shard = self._file.find(tensor)
        if shard is None:
            return ""
        try:
            self._file.require(shard, in_order=in_order)
        except OSError as error:
            return f"could not be read: {error.strerror}"
        return ""


def _made_of(kind: type[FileOffloadPolicy], values: dict[str, Any]) -> FileOffloadPolicy:
    return kind(**values)


def _opened(folder: Path) -> FileSpace:
    """Return the file, in a folder on a disk.

    Raises:
        ValueError: if there is no such folder, or no file can be made there.
    """
    advice = "pass an existing folder on a local disk of this host, to which the process may write"
    if not hasattr(os, "posix_fadvise"):
        raise ValueError(f"shards in files need Linux, and this is {sys.platform}")
    try:
        space = FileSpace(folder, prefix="fullshard-shards-", direct=False)
    except OSError as error:
        raise ValueError(
            f"folder is {str(folder)!r}, where no file can be made: {error.strerror}; {advice}"
        ) from None
    system = _IN_MEMORY.get(_system_of(space.fd))
    if system is not None:
        warnings.warn(
            f"folder is {str(folder)!r}, which is on a {system}: its files are memory, so shards "
            f"there save none; {advice}",
            stacklevel=4,
        )
    return space


def _system_of(fd: int) -> int:
    """Return the type of the file system of an open file: the first field of ``fstatfs``."""
    found = (ctypes.c_ulong * 32)()
    failed = ctypes.CDLL(None, use_errno=True).fstatfs(fd, ctypes.byref(found))
    return -1 if failed else found[0] & 0xFFFFFFFF
