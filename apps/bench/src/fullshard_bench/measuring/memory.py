"""Peak memory of one contestant's step.

Owns two ways to measure it. CUDA's allocator keeps the peak. The CPU's allocator does not, so one
step runs under a dispatch mode. After each operation, the mode reads the storages of all tensors
that the step has read or written so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.preflight.spi import Sharing, Storages, local_tensors
from fullshard_bench.compat import DispatchMode
from fullshard_bench.contestants.training import Trainee
from fullshard_bench.measuring.counting import shared_ranges

__all__ = ["Memory", "StorageTracker", "cpu_memory", "cuda_memory"]

DEFINITION = (
    "peak memory: on CUDA the allocator's peak in a step, less what other contestants hold;"
    " on the CPU the largest sum, seen after any operation of a step, of the storages that it or"
    " the step before read or wrote and that are still there, of which memory that ranks share"
    " counts in equal parts on each, and once however often it is mapped"
)

Memory = dict[str, int]
"""Bytes by name: `held` between steps, after `forward`, and at the `peak` of a step."""


class StorageTracker(DispatchMode):
    """Adds up the storages of all tensors it sees, and keeps the largest sum.

    Args:
        sharers: processes that map memory which this one shares; each counts its part.
    """

    def __init__(self, sharers: int = 1) -> None:
        super().__init__()
        ranges = shared_ranges() if sharers > 1 else []

        def sharing_of(tensor: torch.Tensor) -> Sharing:
            if not ranges:
                return Sharing()
            try:
                address = tensor.untyped_storage().data_ptr()
            except RuntimeError:  # it has no memory of its own: it stands for another tensor
                return Sharing()
            files = (file for low, high, file in ranges if low <= address < high)
            return next((Sharing(sharers, file) for file in files), Sharing())

        self._storages = Storages(sharing_of)
        self.peak = 0

    def look(self, *values: Any) -> None:
        """Take note of tensors, and of how much all known ones hold now."""
        for tensor in local_tensors(values):
            self._storages.number(tensor)
        self.peak = max(self.peak, self._storages.nbytes())

    @property
    def now(self) -> int:
        """Bytes that all known storages hold now."""
        return self._storages.nbytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, then look."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor first: its local operations come back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.look(args, list(kwargs.values()), result)
        return result


def cpu_memory(trainee: Trainee, step: Callable[[], object], sharers: int) -> Memory:
    """Run `step` twice; what the contestant holds and the most its step needs.

    The first time to learn of memory that stays from step to step. `sharers`: as for
    `StorageTracker`.
    """
    held = StorageTracker(sharers)
    held.look(trainee.held())
    tracker = StorageTracker(sharers)
    tracker.look(trainee.held())
    with tracker:
        step()
    tracker.peak = tracker.now
    forward = _Reading(lambda: tracker.now)
    with tracker, forward.of(trainee):
        step()
    return {"held": held.now, "forward": forward.value, "peak": tracker.peak}


def cuda_memory(trainee: Trainee, step: Callable[[], object], device: torch.device) -> Memory:
    """Return the figures of `cpu_memory`, as CUDA's allocator counts them."""
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    held = StorageTracker()
    held.look([each for each in trainee.held() if each.is_cuda])
    others = torch.cuda.memory_allocated(device) - held.now
    forward = _Reading(lambda: torch.cuda.memory_allocated(device) - others)
    with forward.of(trainee):
        step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - others
    return {"held": held.now, "forward": forward.value, "peak": peak}


class _Reading:
    """Number that is read between forward and backward."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self.value = 0

    @contextmanager
    def of(self, trainee: Trainee) -> Iterator[None]:
        """Return a context; each step inside it reads the number."""

        def look() -> None:
            self.value = self._read()

        trainee.after_forward = look
        try:
            yield
        finally:
            trainee.after_forward = None
