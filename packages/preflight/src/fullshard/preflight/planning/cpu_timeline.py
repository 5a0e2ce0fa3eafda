"""A step's launches put in time on CPU ranks, which compute, and wait for collectives beside.

Owns the clock of a device whose host is the device: operations run one after the other on the
thread that calls them, and a wait blocks it. A collective runs beside them, on threads of its
process group; where ranks leave no core idle, the processor seconds that it takes are missing to
what is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fullshard.preflight.costs.collectives import Axis, Traffic, traffic_of
from fullshard.preflight.costs.devices import Device
from fullshard.preflight.costs.kernels import Kernel
from fullshard.preflight.costs.ranks import Moving
from fullshard.preflight.costs.timing import Moved
from fullshard.preflight.planning.places import Place
from fullshard.preflight.planning.recorder import Collective, Launch, Record
from fullshard.preflight.planning.timeline import Idle, Span, Timeline, count_traffic

__all__ = ["CPUCosts", "replay_on_cpu"]

_MOST = 0.95  # of a core that a collective can take


class CPUCosts(Protocol):
    """How long things take on a CPU."""

    @property
    def device(self) -> Device:
        """The description of it."""
        ...

    @property
    def is_crowded(self) -> bool:
        """Whether no core is idle, so that a collective takes its time from computing."""
        ...

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of an operation and what the host adds to it."""
        ...

    def moved(self, move: Moving) -> Moved:
        """What a collective takes."""
        ...


class _Clock:
    """The time of one rank, and of the collectives that it launched.

    Attributes:
        now: of the rank's thread.
        waits: seconds in which it waited for collectives, by place.
    """

    def __init__(self, costs: CPUCosts) -> None:
        self.now = 0.0
        self.waits: dict[Place, Idle] = {}
        self._place = Place("between steps")
        self._costs = costs
        self._ends: dict[tuple[int, int], float] = {}
        self._free: dict[int, float] = {}
        self._flights: list[tuple[float, float, float]] = []  # start, end, part of a core

    def wait(self, record: Record) -> None:
        """Blocks until all that a record comes after is over."""
        if isinstance(record, Launch):
            self._place = record.place
        self._until(max((self._ends.get(each, 0.0) for each in record.after.items()), default=0.0))

    def _until(self, over: float) -> None:
        if over > self.now:
            self.waits.setdefault(self._place, Idle()).exposed += over - self.now
            self.now = over

    def compute(self, seconds: float) -> float:
        """Computes; returns when it began."""
        start = self.now
        for begin, end, part in self._flights:
            if end <= self.now or not seconds:
                continue
            alone = min(seconds, max(0.0, begin - self.now))
            self.now, seconds = self.now + alone, seconds - alone
            if seconds:
                beside = min(seconds, (end - self.now) * (1 - part))
                self.now, seconds = self.now + beside / (1 - part), seconds - beside
        self.now += seconds
        self._flights = [each for each in self._flights if each[1] > self.now]
        return start

    def launch(self, stream: int, number: int, moved: Moved) -> tuple[float, float]:
        """Launches a collective; returns when it begins and ends."""
        start = max(self.now, self._free.get(stream, 0.0))
        end = start + moved.seconds
        busy = max(0.0, moved.busy - moved.issue)
        if self._costs.is_crowded and end > start:
            self._flights.append((start, end, min(_MOST, busy / moved.seconds)))
        self._free[stream] = self._ends[stream, number] = end
        self.now += moved.issue
        return start, end

    def end(self) -> float:
        """When all is over."""
        self._until(max((self.now, *self._free.values())))
        return self.now


def replay_on_cpu(
    records: Sequence[Record], streams: Mapping[int, str], costs: CPUCosts
) -> Timeline:
    """Puts what a step launched in time on a CPU."""
    clock, spans, flops = _Clock(costs), [], 0
    sent: dict[Axis, Traffic] = {}
    for record in records:
        clock.wait(record)
        if not isinstance(record, Launch):
            continue
        if isinstance(record.work, Collective):
            moved = costs.moved(moving(record.work))
            axis, nbytes = record.work.axis, record.work.nbytes
            count_traffic(sent, axis, traffic_of(record.work.name, nbytes, axis, costs.device))
            start, end = clock.launch(record.stream, record.number, moved)
        else:
            assert isinstance(record.work, Kernel), "a CPU copies nothing to a host"
            start, end = clock.compute(costs.kernel(record.work)), clock.now
            flops += 0 if record.again else record.work.flops
        spans.append(Span(record, start, end))
    step_time = clock.end()
    return Timeline(
        device=costs.device,
        streams={number: streams[number] for number in sorted({s.launch.stream for s in spans})},
        spans=tuple(spans),
        step_time=step_time,
        exposed=sum(each.exposed for each in clock.waits.values()),
        host_bound=0.0,
        parts=clock.waits,
        flops=flops,
        traffic=sent,
        copies={},
    )


def moving(work: Collective) -> Moving:
    """What is to be measured of a collective."""
    return Moving(work.name, work.nbytes, Axis(work.axis.size, work.axis.stride))
