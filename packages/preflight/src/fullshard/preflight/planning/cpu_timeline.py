"""Puts a step's launches in time on CPU ranks, which compute and wait for collectives.

Owns the clock of a device whose host is the device: operations run one after the other on the
thread that calls them, and a wait blocks it. A collective runs at the same time, on threads of its
process group; while a rank computes, it takes longer, and slows down what is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from fullshard.preflight.costs.collectives import Axis, Collective, Traffic, traffic_of
from fullshard.preflight.costs.here import MeasuredCosts
from fullshard.preflight.costs.kernels import Kernel
from fullshard.preflight.costs.timing import Moved
from fullshard.preflight.planning.memory.places import Place
from fullshard.preflight.planning.recorder import Launch, Record
from fullshard.preflight.planning.timeline import Idle, Span, Timeline, count_traffic

__all__ = ["replay_on_cpu"]

_LEAST = 0.05  # of a core, left for computing during collectives


@dataclass(slots=True, eq=False)
class _Flight:
    """A collective that was launched.

    Attributes:
        moved: what it takes.
        left: the remaining part.
        start: when it began; None while another of its stream is under way.
        end: when it was over.
    """

    moved: Moved
    left: float = 1.0
    start: float | None = None
    end: float | None = None

    def seconds(self, *, computing: bool) -> float:
        """From its beginning to its end, if the rank computed all the while, or waited."""
        return self.moved.beside if computing else self.moved.seconds

    @property
    def share(self) -> float:
        """The part of a core that it takes from computing."""
        return self.moved.stolen / self.moved.beside if self.moved.beside else 0.0


class _Clock:
    """The clock of a rank and of the collectives that the rank launched.

    Attributes:
        now: of the rank's thread.
        waits: seconds in which it waited for collectives, by place.
    """

    def __init__(self, costs: MeasuredCosts) -> None:
        self.now = 0.0
        self.waits: dict[Place, Idle] = {}
        self._place = Place("between steps")
        self._costs = costs
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._queues: dict[int, list[_Flight]] = {}

    def wait(self, record: Record) -> None:
        """Blocks until all that a record comes after is over."""
        if isinstance(record, Launch):
            self._place = record.place
        for each in record.after.items():
            if each in self._flights:
                self._until_over(self._flights[each])

    def _until_over(self, flight: _Flight) -> None:
        before = self.now
        while flight.end is None:
            self._pass(self._to_next_end(computing=False), computing=False)
        if self.now > before:
            self.waits.setdefault(self._place, Idle()).exposed += self.now - before

    def _under_way(self) -> list[_Flight]:
        return [queue[0] for queue in self._queues.values() if queue]

    def _to_next_end(self, *, computing: bool) -> float:
        ends = (each.left * each.seconds(computing=computing) for each in self._under_way())
        return min(ends, default=inf)

    def _pass(self, seconds: float, *, computing: bool) -> None:
        """Let time pass, no more than to the next end of a collective."""
        self.now += seconds
        for queue in self._queues.values():
            if not queue:
                continue
            flight = queue[0]
            whole = flight.seconds(computing=computing)
            flight.left -= seconds / whole if whole else 1.0
            if flight.left <= 1e-9:
                flight.end = self.now
                del queue[0]
                self._begin(queue)

    def _begin(self, queue: list[_Flight]) -> None:
        if queue and queue[0].start is None:
            queue[0].start = self.now

    def compute(self, seconds: float) -> float:
        """Computes; returns when it began."""
        start = self.now
        while seconds > 0:
            speed = max(_LEAST, 1.0 - sum(each.share for each in self._under_way()))
            passed = min(seconds / speed, self._to_next_end(computing=True))
            self._pass(passed, computing=True)
            seconds = 0.0 if passed * speed >= seconds else seconds - passed * speed
        return start

    def launch(self, stream: int, number: int, moved: Moved) -> _Flight:
        """Launch a collective, which begins when those before it on its stream are over."""
        flight = self._flights[stream, number] = _Flight(moved)
        queue = self._queues.setdefault(stream, [])
        queue.append(flight)
        self._begin(queue)
        return flight

    def end(self) -> float:
        """When all is over."""
        for each in self._flights.values():
            self._until_over(each)
        return self.now


def replay_on_cpu(
    records: Sequence[Record], streams: Mapping[int, str], costs: MeasuredCosts
) -> Timeline:
    """Put what a step launched in time on a CPU."""
    clock, flops = _Clock(costs), 0
    spans: list[Span | tuple[Launch, _Flight]] = []
    sent: dict[Axis, Traffic] = {}
    for record in records:
        clock.wait(record)
        if not isinstance(record, Launch):
            continue
        if isinstance(record.work, Collective):
            count_traffic(sent, record.work.axis, traffic_of(record.work, costs.device))
            moved = costs.moved(record.work)
            spans.append((record, clock.launch(record.stream, record.number, moved)))
        else:
            assert isinstance(record.work, Kernel), "a CPU copies nothing to a host"
            start = clock.compute(costs.kernel(record.work))
            spans.append(Span(record, start, clock.now))
            flops += 0 if record.again else record.work.flops
    step_time = clock.end()
    told = tuple(each if isinstance(each, Span) else _span(*each) for each in spans)
    return Timeline(
        device=costs.device,
        streams={number: streams[number] for number in sorted({s.launch.stream for s in told})},
        spans=told,
        step_time=step_time,
        parts=clock.waits,
        flops=flops,
        traffic=sent,
        copies={},
    )


def _span(launch: Launch, flight: _Flight) -> Span:
    assert flight.start is not None and flight.end is not None, "all are over at the step's end"
    return Span(launch, flight.start, flight.end)
