"""Records what a step launches: kernels and collectives, on which stream, and after what.

Owns the simulated machine under a plan, whose clocks say what each launch is ordered after: the
engine's own events and waits, and those of autograd. Refuses seconds: ``timeline`` puts them in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fullshard.preflight.costs.collectives import Axis
from fullshard.preflight.costs.kernels import Kernel, kernel_of
from fullshard.preflight.planning.places import Place, Places
from fullshard.preflight.races.collectives import Collectives, Launched
from fullshard.preflight.simulation.device import accelerated
from fullshard.preflight.simulation.streams import Clock, Machine, SimulatedStream

__all__ = ["Collective", "HostWait", "Launch", "Recorder"]


@dataclass(frozen=True, slots=True)
class Collective:
    """What moves.

    Attributes:
        name: the operator's, without its namespace.
        nbytes: of an all-gather's output, a reduce-scatter's input, an all-reduce's tensor.
        axis: among whom.
    """

    name: str
    nbytes: int
    axis: Axis


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel or a collective that was launched.

    Attributes:
        stream: the number of its stream.
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
    work: Kernel | Collective
    again: bool


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waited for work; what it launches next comes later."""

    after: Clock


class _Machine(Machine):
    """A machine that tells of the host's waits."""

    def __init__(self, records: list[Launch | HostWait]) -> None:
        super().__init__()
        self._records = records

    def host_waits(self, clock: Clock) -> None:
        """Makes the host wait for all that a clock knows."""
        self._records.append(HostWait(dict(clock)))
        super().host_waits(clock)


class Recorder:
    """Follows the streams of a plan's run, and records the launches of a step.

    Attributes:
        records: launches and waits of the host since ``restart()``, in the host's order.

    Args:
        places: tells where in the step a launch is.
    """

    def __init__(self, places: Places) -> None:
        self.records: list[Launch | HostWait] = []
        self._places = places
        self._machine = _Machine(self.records)
        self._collectives = Collectives(self._machine)
        self._axes: dict[dist.ProcessGroup, Axis] = {}

    @property
    def streams(self) -> dict[int, str]:
        """The names of all streams, by number; the first computes."""
        return {each.number: each.name for each in self._machine.streams}

    @contextmanager
    def following(self, *, streams: bool) -> Iterator[None]:
        """Inside the ``with`` block the CPU's ``streams`` are simulated; or its works alone."""
        with ExitStack() as stack:
            if streams:
                stack.enter_context(accelerated(self._machine))
            stack.enter_context(self._collectives.intercepted())
            yield

    def restart(self) -> None:
        """Forgets what was recorded."""
        self.records.clear()

    def launched(self, func: Any, args: Any, kwargs: Any) -> Launched | None:
        """Is asked before an operation runs: the collective that it is, if it is one."""
        return self._collectives.launched(func, args, kwargs) if func.namespace == "c10d" else None

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any, move: Launched | None) -> None:
        """Is told after an operation ran."""
        if move is not None:
            self._add(move.stream, self._moved(move))
            return
        kernel = kernel_of(func, args, kwargs, result)
        if kernel is not None:
            self._add(self._machine.current(), kernel)

    def _moved(self, move: Launched) -> Collective:
        tensors = move.written if "gather" in move.name else move.read
        nbytes = sum(each.numel() * each.itemsize for each in tensors)
        group = self._collectives.group
        assert group is not None, "it was launched by one"
        if group not in self._axes:
            ranks = dist.get_process_group_ranks(group)
            self._axes[group] = Axis(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
        return Collective(move.name, nbytes, self._axes[group])

    def _add(self, stream: SimulatedStream, work: Kernel | Collective) -> None:
        number, place = self._machine.begin(stream), self._places.now()
        again = place.phase == "backward" and torch.is_grad_enabled()
        self.records.append(Launch(stream.number, number, dict(stream.clock), place, work, again))
