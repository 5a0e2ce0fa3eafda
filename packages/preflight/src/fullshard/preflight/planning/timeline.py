"""The times of a step's launches on one device, and the waits between its streams.

Owns the clock: the host launches one operation after the other; an operation begins when it is
launched, its stream is free and all that it is ordered after is over. A step begins with idle
streams, so a host that runs ahead into the next step gains nothing here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fullshard.preflight.costs.collectives import (
    Axis,
    Collective,
    Traffic,
    collective_seconds,
    traffic_of,
)
from fullshard.preflight.costs.devices import Device, host_seconds, transfer_seconds
from fullshard.preflight.costs.kernels import Kernel, kernel_seconds
from fullshard.preflight.planning.memory.places import Place
from fullshard.preflight.planning.recorder import HostWait, Launch, Record, Transfer

__all__ = ["Idle", "Span", "Timeline", "count_traffic", "replay"]

_HOST, _COMPUTE = 0, 1


@dataclass(frozen=True, slots=True)
class Span:
    """A launch in time.

    Attributes:
        launch: what it is.
        start: seconds since the step began.
        end: seconds since the step began.
    """

    launch: Launch
    start: float
    end: float


@dataclass(slots=True)
class Idle:
    """Seconds in which nothing is computed.

    Attributes:
        exposed: since a collective or a copy is waited for.
        host_bound: since the host has not launched it yet.
    """

    exposed: float = 0.0
    host_bound: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step in time.

    Attributes:
        device: on what.
        streams: the names of the streams that were used, by number.
        spans: what ran, in the order in which it was launched.
        step_time: seconds of the whole step.
        parts: the seconds in which nothing is computed, at each place of the step that has any.
        flops: FLOPs of matrix products and attention, without what is computed again.
        traffic: what this rank sends, by the axis of the mesh.
        copies: what is copied between the device and its host, by direction.
    """

    device: Device
    streams: Mapping[int, str]
    spans: tuple[Span, ...]
    step_time: float
    parts: Mapping[Place, Idle]
    flops: int
    traffic: Mapping[Axis, Traffic]
    copies: Mapping[str, Traffic]

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed, since a collective or a copy is waited for."""
        return sum(each.exposed for each in self.parts.values())

    @property
    def host_bound(self) -> float:
        """Seconds in which nothing is computed, since the host has not launched it yet."""
        return sum(each.host_bound for each in self.parts.values())

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al. 2022): of the device's peak in the step."""
        dtypes = [
            (each.launch.work.flops, each.launch.work.dtype)
            for each in self.spans
            if isinstance(each.launch.work, Kernel) and each.launch.work.flops
        ]
        if not dtypes:
            return 0.0
        peak = self.device.peak(max(dtypes, key=lambda pair: pair[0])[1])
        return self.flops / (self.step_time * peak)

    def _worst(self) -> list[str]:
        """The places with the most of what is waited for, if it is 1 % of the step."""
        lines = []
        for title, name in (("exposed", "exposed"), ("host-bound", "host_bound")):
            parts = {place: getattr(idle, name) for place, idle in self.parts.items()}
            largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
            told = [(place, part) for place, part in largest if part > 0.01 * self.step_time]
            if told:
                named = ", ".join(f"{place} {1e3 * part:.2f} ms" for place, part in told)
                lines.append(f"  {title} most in {named}")
        return lines

    @property
    def by_bytes_alone(self) -> tuple[str, ...]:
        """Operators of unknown work, timed as if they only read and wrote their operands."""
        kernels = (each.launch.work for each in self.spans if isinstance(each.launch.work, Kernel))
        return tuple(sorted({each.name for each in kernels if each.by_bytes_alone}))

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace with a row for each stream, which Perfetto opens."""
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}}
            for number, name in self.streams.items()
        ]
        events += [_event(each) for each in self.spans]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        """A table for a person."""
        lines = [
            f"{1e3 * self.step_time:.2f} ms a step on {self.device.name}, of which"
            f" {1e3 * self.exposed:.2f} ms wait for collectives and"
            f" {1e3 * self.host_bound:.2f} ms for the host",
            *self._worst(),
            f"  {100 * self.utilisation:.1f} % of the FLOP/s at most (MFU)",
        ]
        for axis, sent in self.traffic.items():
            along = f"along {axis.name}, {axis.size} ranks" if axis.name else f"{axis.size} ranks"
            lines.append(f"  sends {_moved(sent)} over {sent.link}, {along}")
        for name, sent in self.copies.items():
            lines.append(f"  {name}: {_moved(sent)} over {sent.link}")
        lines.append(f"  {self.device.basis}")
        if self.by_bytes_alone:
            named = ", ".join(self.by_bytes_alone)
            lines.append(f"  timed by their bytes alone, since their FLOPs are not known: {named}")
        return "\n".join(lines)


def replay(records: Iterable[Record], streams: Mapping[int, str], device: Device) -> Timeline:
    """Put what a step launched on a device in time."""
    clock = _Clock(device, streams)
    for record in records:
        clock.take(record)
    return clock.timeline(streams)


class _Clock:
    """When each stream and the host are free, as launches are put in time one after the other."""

    def __init__(self, device: Device, streams: Mapping[int, str]) -> None:
        self._device = device
        self._host = 0.0
        self._free = dict.fromkeys(streams, 0.0)
        self._ends: dict[tuple[int, int], float] = {}
        self._spans: list[Span] = []
        self._flops = 0
        self._parts: dict[Place, Idle] = {}
        self._traffic: dict[Axis, Traffic] = {}
        self._copies: dict[str, Traffic] = {}

    def take(self, record: Record) -> None:
        """Put the next record in time."""
        over = max((self._ends.get(each, 0.0) for each in record.after.items()), default=0.0)
        if isinstance(record, HostWait):
            self._host = max(self._host, over)
        elif record.stream == _HOST:
            self._host = max(self._host, over)
            self._add(record, self._host)
            self._host = self._free[_HOST]
        else:
            self._host += self._device.launch
            start = max(self._host, self._free[record.stream], over)
            if record.stream == _COMPUTE:
                self._idle(record.place, start, over)
            self._add(record, start)
            if record.stream == _COMPUTE and self._device.synchronous:
                self._host = self._free[_COMPUTE]

    def _add(self, launch: Launch, start: float) -> None:
        end = start + self._seconds(launch)
        self._ends[launch.stream, launch.number] = end
        self._free[launch.stream] = end
        self._spans.append(Span(launch, start, end))

    def _idle(self, place: Place, start: float, over: float) -> None:
        free = self._free[_COMPUTE]
        waits = max(0.0, over - max(free, self._host))
        if start > free:
            part = self._parts.setdefault(place, Idle())
            part.exposed += waits
            part.host_bound += start - free - waits

    def _seconds(self, launch: Launch) -> float:
        work, device = launch.work, self._device
        if isinstance(work, Transfer):
            count_traffic(self._copies, work.name, Traffic(device.host.link, work.nbytes, 1))
            return transfer_seconds(work.nbytes, device.host, device.efficiency.link)
        if isinstance(work, Collective):
            count_traffic(self._traffic, work.axis, traffic_of(work, device))
            return collective_seconds(work, device)
        if launch.stream == _HOST:
            return host_seconds(work.nbytes, device.host, device.efficiency.memory)
        self._flops += 0 if launch.again else work.flops
        return kernel_seconds(work, device)

    def timeline(self, streams: Mapping[int, str]) -> Timeline:
        """Return all operations with their times."""
        step_time = max((*self._free.values(), self._host), default=0.0)
        free = self._free[_COMPUTE]
        if step_time > free and self._spans:
            end = self._parts.setdefault(self._spans[-1].launch.place, Idle())
            end.host_bound += max(0.0, self._host - free)
            end.exposed += step_time - max(free, self._host)
        used = sorted({each.launch.stream for each in self._spans})
        return Timeline(
            device=self._device,
            streams={number: streams[number] for number in used},
            spans=tuple(self._spans),
            step_time=step_time,
            parts=self._parts,
            flops=self._flops,
            traffic=self._traffic,
            copies=self._copies,
        )


_Key = TypeVar("_Key")


def count_traffic(sent: dict[_Key, Traffic], key: _Key, more: Traffic) -> None:
    """Add to what was sent by a key, such as an axis."""
    before = sent.get(key, Traffic(more.link, 0.0, 0))
    sent[key] = Traffic(more.link, before.nbytes + more.nbytes, before.messages + more.messages)


def _moved(sent: Traffic) -> str:
    return f"{sent.nbytes / 2**20:.1f} MiB in {sent.messages} messages"


def _event(span: Span) -> dict[str, object]:
    launch, work = span.launch, span.launch.work
    about: dict[str, object] = {"place": str(launch.place), "bytes": work.nbytes}
    if isinstance(work, Kernel):
        about["FLOPs"] = work.flops
    elif isinstance(work, Collective):
        about["ranks"] = work.axis.size
        about["axis"] = work.axis.name
    return {
        "name": work.name.removeprefix("aten::"),
        "cat": type(work).__name__.lower(),
        "ph": "X",
        "pid": 0,
        "tid": launch.stream,
        "ts": 1e6 * span.start,
        "dur": 1e6 * (span.end - span.start),
        "args": about,
    }
