"""Collectives as work on streams: what each reads and writes, and the handle that waits for it.

Owns the table of torch's collectives, since their schemas do not say what they write; a collective
that is not in the table is an error. As with NCCL a synchronous collective runs on the current
stream, and an asynchronous one on a stream of the process group's own: that waits for the current
stream, and ``wait()`` makes whichever stream is current then wait for it. Until then the handle
keeps the tensors. Over the backend ``fake``, which moves nothing, every other rank holds what this
one does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fullshard.preflight.simulation.streams import Machine, SimulatedEvent, SimulatedStream
from fullshard.preflight.tensors import local_tensors

__all__ = ["Collectives", "Launched", "UnknownCollectiveError"]


class UnknownCollectiveError(NotImplementedError):
    """The reads and writes of a collective are not known."""


_OUT_IN = (0,), (1,)
_IN_PLACE = (0,), (0,)
_TABLE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # written arguments, read arguments
    "_allgather_base_": _OUT_IN,
    "_reduce_scatter_base_": _OUT_IN,
    "allgather_": _OUT_IN,
    "allgather_coalesced_": _OUT_IN,
    "allgather_into_tensor_coalesced_": _OUT_IN,
    "allreduce_": _IN_PLACE,
    "allreduce_coalesced_": _IN_PLACE,
    "alltoall_": _OUT_IN,
    "alltoall_base_": _OUT_IN,
    "barrier": ((), ()),
    "broadcast_": _IN_PLACE,
    "gather_": _OUT_IN,
    "recv_": ((0,), ()),
    "recv_any_source_": ((0,), ()),
    "reduce_": _IN_PLACE,
    "reduce_scatter_": _OUT_IN,
    "reduce_scatter_tensor_coalesced_": _OUT_IN,
    "scatter_": _OUT_IN,
    "send": ((), (0,)),
}
# Methods of a process group that launch a collective, in torch 2.11 to 2.15.
_METHODS = re.compile(r"_?(all|barrier|broadcast|end_coalescing|gather|recv|reduce|scatter|send)")


@dataclass(frozen=True)
class Launched:
    """A collective that was launched.

    Attributes:
        name: the operator's.
        stream: where it runs.
        written: what it writes.
        read: what it reads.
        group: among whom; None if no method of a process group launched it.
    """

    name: str
    stream: SimulatedStream
    written: tuple[torch.Tensor, ...]
    read: tuple[torch.Tensor, ...]
    group: dist.ProcessGroup | None


class SimulatedWork(dist.Work):
    """The handle of a collective on a simulated stream."""

    def __init__(self, machine: Machine, launched: Launched, inside: object = None) -> None:
        super().__init__()
        self._machine = machine
        self._done = SimulatedEvent(machine)
        self._done.record(launched.stream)
        self._kept = (*launched.written, *launched.read)
        self._inside = inside
        self._asked = False

    def is_completed(self) -> bool:
        """Whether it is over: False at the first call, True from then on, and the host knows it.

        A caller that asks right after the launch and continues with other work does not wait; who
        asks in a loop leaves it.
        """
        asked, self._asked = self._asked, True
        return asked and self._done.query()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait, and let go of the tensors."""
        self._done.wait()
        self._kept = ()
        return True

    def synchronize(self) -> None:
        """As ``wait()``."""
        self.wait()


def _keep_nothing(launched: Launched) -> None:
    """Keep nothing for a collective in flight."""


class Collectives:
    """The collectives of a machine.

    Attributes:
        group: the process group that launches one now; None if no group does.
        landing: whether a backend ends one now. The backend's work for this belongs to the
            collective, such as gloo's copy of the result of a reduce-scatter in its wait.
        keep: returns the memory that a collective's handle keeps until its wait, in addition to
            tensors.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._streams: dict[int, SimulatedStream] = {}
        self.group: dist.ProcessGroup | None = None
        self.landing = False
        self._last: Launched | None = None
        self.keep: Callable[[Launched], object] = _keep_nothing

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """Inside the ``with`` block process groups give handles that wait on simulated streams."""
        group = dist.ProcessGroup
        methods = {name: getattr(group, name) for name in dir(group) if _METHODS.match(name)}
        wrapped = {name: self._wrapped(method) for name, method in methods.items()}
        with patch.multiple(group, **wrapped):
            yield

    def _wrapped(self, method: Any) -> Any:
        def launch(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            outer, self.group = self.group, group
            self._last = None
            try:
                work = method(group, *args, **kwargs)
            finally:
                self.group = outer
                last, self._last = self._last, None  # its tensors are not kept
            if not isinstance(work, dist.Work) or last is None:
                return work
            self._land(work)  # the bytes are there when a real device's would be
            return SimulatedWork(self._machine, last, self.keep(last))

        return launch

    def _land(self, work: dist.Work) -> None:
        self.landing = True
        try:
            work.wait()
        finally:
            self.landing = False

    def launched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launched:
        """Which memory a collective reads and writes, and on which stream.

        Raises:
            UnknownCollectiveError: if that is not known.
        """
        schema = func._schema
        name = schema.name.removeprefix("c10d::")
        if name not in _TABLE:
            raise UnknownCollectiveError(
                f"{schema.name} was called, and neither what this collective reads and writes nor "
                "what it takes is known; use one of " + ", ".join(sorted(_TABLE))
            )
        values = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        asynchronous = bool(values.get("async_op", values.get("asyncOp", True)))
        written, read = (
            tuple(local_tensors([args[place] for place in places])) for places in _TABLE[name]
        )
        stream = self._machine.current()
        if asynchronous:
            own = self.stream_of(self.group)
            own.wait_stream(stream)
            stream = own
        self._last = Launched(name, stream, written, read, self.group)
        return self._last

    def stream_of(self, group: dist.ProcessGroup | None) -> SimulatedStream:
        """The stream on which a process group runs what is asynchronous."""
        if id(group) not in self._streams:
            name = "collectives" if group is None else f"collectives of {group.group_desc}"
            self._streams[id(group)] = self._machine.stream(name)
        return self._streams[id(group)]

    def fill(self, launched: Launched) -> None:
        """Set the outputs to their values in a world whose ranks all hold this rank's data."""
        group = self.group
        if group is None or group.name() != "fake" or not launched.written:
            return
        size, rank = group.size(), group.rank()
        if launched.name in ("_allgather_base_", "allgather_into_tensor_coalesced_"):
            for output, given in zip(launched.written, launched.read, strict=True):
                output.view(size, -1).copy_(given.clone().view(1, -1).expand(size, -1))
        elif launched.name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
            for output, given in zip(launched.written, launched.read, strict=True):
                output.view(-1).copy_(given.view(size, -1)[rank])
        elif launched.name == "alltoall_base_":
            launched.written[0].zero_()
