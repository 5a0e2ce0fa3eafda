"""Records what a step launches: kernels, collectives and copies, on which stream, and after what.

Owns the simulated machine under a plan, whose clocks say what each launch is ordered after: the
engine's own events and waits, and those of autograd. Refuses seconds: ``timeline`` puts them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.preflight.costs.collectives import Axis, Collective
from fullshard.preflight.costs.kernels import Kernel, kernel_of
from fullshard.preflight.costs.pages import Allocations
from fullshard.preflight.planning.memory.places import Place, Places
from fullshard.preflight.planning.memory.storages import Storages
from fullshard.preflight.races.collectives import Collectives, Launched, UnknownCollectiveError
from fullshard.preflight.races.functional import FunctionalCollectives
from fullshard.preflight.simulation.device import accelerated
from fullshard.preflight.simulation.streams import Actor, Clock, Machine, join
from fullshard.preflight.tensors import local_tensors

__all__ = [
    "CollectiveRecorder",
    "HostWait",
    "Launch",
    "Ran",
    "Record",
    "Recorder",
    "Transfer",
    "Work",
]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between a device and its host.

    Attributes:
        nbytes: how much.
        to_host: whether to the host; else from it.
    """

    nbytes: int
    to_host: bool

    @property
    def name(self) -> str:
        """Which way it goes."""
        return "copy to the host" if self.to_host else "copy to the device"


Work = Kernel | Collective | Transfer


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, a collective or a copy that was launched; or what the host did itself.

    Attributes:
        stream: the number of its stream; 0 is the host.
        number: its own on that stream.
        after: what is over before it begins.
        place: where in the step.
        work: what it does.
        again: whether it computes what forward had computed before.
    """

    stream: int
    number: int
    after: Clock
    place: Place
    work: Work
    again: bool


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waited for work; what it launches next comes later."""

    after: Clock


@dataclass(frozen=True, slots=True)
class Ran:
    """An operation that ran, with its arguments and its results."""

    func: Any
    args: Any
    kwargs: Any
    result: Any


Record = Launch | HostWait


class _Machine(Machine):
    """A machine that reports the host's waits."""

    def __init__(self, records: list[Record]) -> None:
        super().__init__()
        self._records = records

    def host_waits(self, clock: Clock) -> None:
        """Make the host wait for all that a clock knows."""
        self._records.append(HostWait(dict(clock)))
        super().host_waits(clock)


class Recorder:
    """Follows the streams of a plan's run, and records the launches of a step.

    Attributes:
        records: launches and waits of the host since ``restart()``, in the host's order.
        allocations: what was allocated and freed since then.

    Args:
        places: returns the place of a launch in the step.
        describe: returns the work of an operation, as ``kernel_of``.
    """

    def __init__(self, places: Places, describe: Callable[..., Kernel | None] = kernel_of) -> None:
        self.records: list[Record] = []
        self.allocations = Allocations()
        self._places = places
        self._describe = describe
        self._machine = _Machine(self.records)
        self._collectives = Collectives(self._machine)
        self._functional = FunctionalCollectives(self._machine, self._collectives)
        self._axes: dict[dist.ProcessGroup, Axis] = {}
        self._landing: Clock = {}

    @property
    def streams(self) -> dict[int, str]:
        """The names of the host, 0, and of all streams by number; the first computes."""
        actors = (self._machine.host, *self._machine.streams)
        return {each.number: each.name for each in actors}

    @contextmanager
    def following(
        self, *, streams: bool, keep: Callable[[Launched], object] | None = None
    ) -> Iterator[None]:
        """Inside the ``with`` block the CPU's ``streams`` are simulated; or its works alone.

        Args:
            streams: whether there are streams.
            keep: returns the memory that a collective keeps until its wait, in addition to its
                tensors.
        """
        if keep is not None:
            self._collectives.keep = keep
        with ExitStack() as stack:
            if streams:
                stack.enter_context(accelerated(self._machine))
            stack.enter_context(self._collectives.intercepted())
            yield

    def restart(self) -> None:
        """Forget what was recorded."""
        self.records.clear()
        self.allocations.restart()

    def launched(self, func: Any, args: Any, kwargs: Any) -> Launched | None:
        """Is asked before an operation runs: the collective that it is, if it is one."""
        return self._collectives.launched(func, args, kwargs) if func.namespace == "c10d" else None

    def ran(self, ran: Ran, move: Launched | None, memory: Storages) -> None:
        """Record an operation after it ran; ``memory`` knows the host's memory."""
        if move is not None:
            self._add(move.stream, self._moved(move))
            return
        if FunctionalCollectives.are(ran.func):
            move = self._functional.launched(ran.func, ran.args, ran.kwargs, ran.result)
            if move is not None:
                self._collectives.keep(move)  # its wait is an operation, and has no handle
                self._add(move.stream, self._moved(move))
                self._functional.landing(move)
            return
        kernel = self._describe(ran.func, ran.args, ran.kwargs, ran.result)
        if kernel is None:
            return
        if not memory.has_host:
            self._add(self._machine.current(), kernel)
            return
        tensors = list(local_tensors((ran.args, list(ran.kwargs.values()), ran.result)))
        on_host = [each for each in tensors if memory.is_on_host(each)]
        if memory.is_hosts_work(tensors):
            join(self._machine.host.clock, self._landing)  # the host reads the copied data
            self._add(self._machine.host, kernel)
        elif on_host and "copy" in kernel.name:
            self._copied(on_host, to_host=memory.is_on_host(tensors[0]))
        else:
            self._add(self._machine.current(), kernel)

    def host_read(self) -> None:
        """Record that the host read a value: the host waits for the current stream."""
        self._machine.host_waits(self._machine.current().clock)

    def worked(self, kernel: Kernel) -> None:
        """Record work that is not an operation of torch, on the current stream."""
        self._add(self._machine.current(), kernel)

    def _copied(self, on_host: list[torch.Tensor], *, to_host: bool) -> None:
        """A copy, whose target comes first among what it is given."""
        stream = self._machine.current()
        nbytes = sum(each.nbytes for each in {id(each): each for each in on_host}.values())
        self._add(stream, Transfer(nbytes, to_host))
        if to_host:
            join(self._landing, stream.clock)

    def _moved(self, move: Launched) -> Collective:
        tensors = move.written if "gather" in move.name else move.read
        nbytes = sum(each.nbytes for each in tensors)
        group = move.group
        assert group is not None, "it was launched by one"
        if group not in self._axes:
            self._axes[group] = _axis_of(group, group.group_desc.removeprefix("mesh_"))
        return Collective(move.name, nbytes, self._axes[group])

    def name_axes(self, mesh: DeviceMesh) -> None:
        """Register the axes of the mesh, by which collectives are named."""
        for name in mesh.mesh_dim_names or ():
            group = mesh.get_group(name)
            self._axes[group] = _axis_of(group, name)

    def _add(self, actor: Actor, work: Work) -> None:
        number, place = self._machine.begin(actor), self._places.now()
        again = place.phase == "backward" and torch.is_grad_enabled()
        self.records.append(Launch(actor.number, number, dict(actor.clock), place, work, again))


class CollectiveRecorder(Recorder):
    """A recorder that follows collectives for their memory alone.

    Args:
        places: knows the place of a launch in the step.
    """

    def __init__(self, places: Places) -> None:
        super().__init__(places, lambda *ran: None)

    def launched(self, func: Any, args: Any, kwargs: Any) -> Launched | None:
        """Return the collective that an operation will run; None if it is no known one."""
        try:
            return super().launched(func, args, kwargs)
        except UnknownCollectiveError:
            return None

    def ran(self, ran: Ran, move: Launched | None, memory: Storages) -> None:
        """Follow an operation that ran."""
        try:
            super().ran(ran, move, memory)
        except UnknownCollectiveError:
            return


def _axis_of(group: dist.ProcessGroup, name: str) -> Axis:
    ranks = dist.get_process_group_ranks(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return Axis(len(ranks), stride, name)
