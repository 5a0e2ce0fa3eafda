"""Stand-ins for what a test of one process does not have: a process group, an accelerator.

The accelerator keeps, for each stream, what is known to have happened before its next piece of
work (a vector clock), so that a test can ask whether one piece of work is ordered after another.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from fullshard.comm import CommStreams
from fullshard.comm.runtime import compat
from fullshard.comm.runtime.streams import Stream

ACCELERATOR = torch.device("cuda", 0)
CPU = torch.device("cpu")


class _Group:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def group_of(rank: int, size: int) -> dist.ProcessGroup:
    """What a rank sees of a process group that nobody else is in."""
    return cast("dist.ProcessGroup", _Group(rank, size))


class StandInStream:
    """A queue of work that knows what happened before its end, per stream, and what it awaits."""

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.known: dict[Stream, int] = {self: 0}
        self.waited: list[StandInEvent] = []

    def wait_event(self, event: StandInEvent) -> None:
        """Know from now on what ``event`` knew."""
        self.waited.append(event)
        for stream, tick in event.known.items():
            self.known[stream] = max(self.known.get(stream, 0), tick)

    def wait_stream(self, stream: StandInStream) -> None:
        """Know from now on what ``stream`` knows."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Nothing: the host waits for no stand-in."""

    def record_event(self, event: object = None) -> StandInEvent:
        """What is known here now."""
        return StandInEvent(stream=self, known=dict(self.known))


@dataclass(frozen=True, eq=False)
class StandInEvent:
    """A snapshot of what a stream knew."""

    stream: StandInStream
    known: dict[Stream, int]


@dataclass(frozen=True, eq=False)
class Step:
    """A piece of work: its name, its stream, its number there, and what had happened before it."""

    name: str
    stream: Stream
    tick: int
    known: dict[Stream, int]

    def is_after(self, other: Step) -> bool:
        """Whether this work is ordered after ``other``, however fast each stream runs."""
        return self.known.get(other.stream, 0) >= other.tick


class StandInModule:
    """Stands for ``torch.cuda``."""

    Stream = StandInStream

    def __init__(self) -> None:
        self.current = StandInStream()
        self.steps: list[Step] = []

    def current_device(self) -> int:
        """A number that is no default."""
        return 3

    def current_stream(self, device: torch.device) -> StandInStream:
        """The stream of the innermost ``stream`` context."""
        return self.current

    @contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        """Make ``stream`` current."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def work(self, name: str) -> Step:
        """Queue a piece of work on the current stream."""
        stream = self.current
        stream.known[stream] += 1
        self.steps.append(Step(name, stream, stream.known[stream], dict(stream.known)))
        return self.steps[-1]

    def named(self, name: str) -> list[Step]:
        """The pieces of work of that name, in the order in which the host queued them."""
        return [step for step in self.steps if step.name == name]


@contextmanager
def stand_in_accelerator() -> Iterator[tuple[StandInModule, CommStreams]]:
    """Streams of an accelerator that writes down every copy that this package makes."""
    module = StandInModule()

    def noting(copy: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **out: Any) -> Any:
            module.work("copy")
            return copy(*given, **out)

        return noted

    copies = ("foreach_copy", "side_by_side", "split_rows")
    noted: dict[str, Any] = {name: noting(getattr(compat, name)) for name in copies}
    with (
        patch("torch.get_device_module", return_value=module),
        patch.multiple(compat, **noted),
        patch.object(torch, "cat", noting(torch.cat)),
    ):
        yield module, CommStreams(ACCELERATOR)


class AloneAllGather:
    """An all-gather of one rank, on a stand-in accelerator; ``works`` makes it asynchronous."""

    def __init__(self, module: StandInModule) -> None:
        self._module = module

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor, which is work for the stream that owns it."""
        self._module.work("allocate")
        return torch.zeros(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Nothing but a note of the work."""
        self._module.work("collective")
        return _NotedWork(self._module) if async_op else None


class AloneReduceScatter(AloneAllGather):
    """A reduce-scatter of one rank, on a stand-in accelerator."""

    def __call__(  # type: ignore[override]
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """The sum over one rank, noted."""
        self._module.work("collective")
        output_tensor.copy_(input_tensor)
        return _NotedWork(self._module) if async_op else None


class _NotedWork(dist.Work):
    """A work handle whose ``wait()`` is noted: it may decode."""

    def __init__(self, module: StandInModule) -> None:
        super().__init__()
        self._module = module

    def wait(self, timeout: object = None) -> bool:
        self._module.work("decode")
        return True


@contextmanager
def no_larger_files_than(nbytes: int) -> Iterator[None]:
    """A limit of the kernel for this process, which holds for segments too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
